// The messages of one operation.  Going out of scope takes back what is not done.
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
  void send(int to, FrameHeader header, const void* data);

  // Everything so far has been sent and received (or refused).
  bool settled();
  bool received();  // all receives so far
  // Waits for everything; a refused message is a mismatch.
  Task finish();
  Task finish_receives();

  // Whether a message of the operation still waits for its receiver to have room for it.
  static bool ungranted(const Operation& op);
  // Lets go of the memory that the operation sends; whether its receivers get everything all the same.
  static bool hand_over(const Operation& op);
  // Ranks whose messages the operation still waits for.
  static std::vector<int> sources_of(const Operation& op);

 private:
  bool refused_ = false;
  Operation& op_;
  Group& group_;
  std::vector<std::shared_ptr<Incoming>> incoming_;
  std::vector<std::pair<Link*, std::shared_ptr<Outgoing>>> outgoing_;
  std::size_t received_ = 0, sent_ = 0;
};

}  // namespace shoal
