// The messages of one operation, and the memory that they need.  The destructor cancels those that are not
// done, and then releases the memory.
#pragma once

#include <memory>
#include <vector>

#include "engine/group.h"
#include "engine/operation.h"

namespace shoal {

class Messages {
 public:
  explicit Messages(Operation& op);
  ~Messages();
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  void send(int to, std::uint32_t step, const void* data, std::uint64_t bytes);
  void receive(int from, std::uint32_t step, void* data, std::uint64_t bytes);
  void post(std::shared_ptr<Incoming> incoming);
  // Memory with any contents.  A message may still be written to it until it is cancelled, so memory of an
  // operation must either come from here, or be declared before its messages.
  std::byte* scratch(std::uint64_t bytes) {
    memory_.push_back(op_.scratch(bytes));
    return memory_.back().get();
  }
  void send(int to, FrameHeader header, const void* data);

  // Whether everything so far has been sent and received (or refused).
  bool settled();
  bool received();  // all receives so far
  // Whether the first frames of all receives so far have arrived.
  bool called();
  // Waits for everything; a refused message is a mismatch.
  Task finish() { return wait(&Messages::settled); }
  Task finish_receives() { return wait(&Messages::received); }

  // Whether a message of the operation still waits for a grant of its receiver.
  static bool ungranted(const Operation& op);
  // Whether all messages of the operation are written, also if the writing thread has not recorded it yet.
  static bool written(const Operation& op);
  // Releases the memory that the operation sends; true if its receivers get everything anyway.
  static bool release_sends(const Operation& op);
  // Ranks whose messages the operation still waits for.
  static std::vector<int> sources_of(const Operation& op);

 private:
  Task wait(bool (Messages::*finished)());

  bool refused_ = false;
  Operation& op_;
  Group& group_;
  std::vector<std::shared_ptr<std::byte>> memory_;
  std::vector<std::shared_ptr<Incoming>> incoming_;
  struct Send {
    Link* link;
    std::shared_ptr<Outgoing> message;
    int to;
  };
  std::vector<Send> outgoing_;
  std::size_t called_ = 0, received_ = 0, sent_ = 0;
};

}  // namespace shoal
