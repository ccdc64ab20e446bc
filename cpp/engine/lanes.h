// The operations of a group that are on their way, and who runs them.
//
// A numbered operation belongs to a lane, whose operations run one after another; keyed operations and
// messages are loose: each has a lane of its own.  Whoever holds a lane's token runs it: the thread that
// submits, one that waits, or the progress thread for what no thread waits for.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/operation.h"

namespace shoal {

class Lanes {
 public:
  Lanes(Group& group, int count);

  // Takes an operation, runs it if it is small, and begins it if it is large.
  void submit(const OperationPtr& op);
  // Drives what stands between `op` and its completion; true if anything moved.
  bool drive(Operation& op);
  // Drives everything that no thread waits for.  `waiting`: such operations remain.
  bool progress(bool& waiting);
  bool pending();
  // A thread that waits for `op` drives its lane: from now on, or no more.
  void add_waiter(const Operation& op);
  void remove_waiter(const Operation& op);

  // Operations whose time has run out, and those at the head of a lane that stall; each stalls once.  The
  // next time to look is written to `next` if earlier.
  struct Late {
    std::vector<OperationPtr> overdue, stalled;
  };
  Late late(std::int64_t now, std::int64_t& next);

  // A numbered operation has completed well.
  void completed(const Operation& op);
  // The last numbered operation that has completed here together with all before it; -1: none has.
  std::int64_t last_completed() const;
  // The first numbered operation that has not ended; ~0: all have.
  std::uint64_t first_pending();

 private:
  struct Lane {
    std::atomic_flag token;
    std::atomic<bool> missed{false};  // somebody found the token taken
    std::atomic<int> waiters{0};      // threads in wait() that drive this lane
    std::mutex mutex;
    std::deque<OperationPtr> queue;
    std::atomic<std::uint64_t> next{0};  // the number of the first operation that has not completed
  };
  struct Loose {
    OperationPtr op;
    std::shared_ptr<Lane> lane;
  };
  // How far operations are run: a thread that submits one only begins the large ones.
  enum class Effort { kBegin, kWhole };
  bool run(Lane& lane, Effort effort = Effort::kWhole);
  bool run_held(Lane& lane, Effort effort);
  void drop_done();  // under the mutex of the loose ones
  Lane& lane_of(const Operation& op) { return lanes_[op.request().channel % lanes_.size()]; }

  Group& group_;
  std::deque<Lane> lanes_;
  std::mutex loose_mutex_;
  std::vector<Loose> loose_;
  std::atomic<int> loose_count_{0};
};

}  // namespace shoal
