// Another library that moves the data of collectives, such as MPI; the core does everything else.
#pragma once

#include "engine/task.h"

namespace shoal {

class Operation;

class Mover {
 public:
  virtual ~Mover() = default;
  // The coroutine that moves the data of a numbered collective.  It starts when all members have met, and in
  // each lane one after another.  It awaits Operation::poll_until(); if the operation fails meanwhile, it is
  // destroyed, and calls Operation::abandon() if the library may still use the memory.
  //
  // Throws MoverFailed.
  virtual Task move(Operation& op) = 0;
};

// The library of a process's movers.
class MovingLibrary {
 public:
  virtual ~MovingLibrary() = default;
  // Sends what earlier operations have left in the buffers of the library.  Called often by a thread of the
  // core while no operation is polled.
  virtual void progress() = 0;
};

}  // namespace shoal
