// The agreements of one group: gives them the time, losses and frames, and sends what they say.
//
// Whichever thread has read a frame, or runs Group::check, answers it: none of them needs Python's lock.  The
// k-th call of a member belongs to the k-th of every other.  They work on groups that are open or broken.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "agreement/agreement.h"
#include "transport/frame.h"

namespace shoal {

class Group;

class Agreements {
 public:
  explicit Agreements(Group& group);

  // Begins this member's next agreement, to be decided within `timeout` nanoseconds; returns its number.
  std::uint64_t begin(agreement::Vote vote, std::int64_t timeout);
  // Waits until `until`; kOpen if there is no outcome by then.
  agreement::Outcome wait(std::uint64_t number, std::int64_t until);
  // Once there is one.  The last kKept are remembered.
  std::optional<agreement::Decision> decision(std::uint64_t number);

  // Returns the flaw of the frame of a member, in words; null if it has none.
  const char* on_frame(int rank, const FrameHeader& header, const std::string& text);
  // A member is lost; dead: certainly.
  void lose(int rank, bool dead);
  // The next time to look is written to `next` if earlier.
  void check(std::int64_t now, std::int64_t& next);

 private:
  static constexpr std::uint64_t kKept = 64;

  // All under the mutex, sending too: so what one agreement says stays in order.
  agreement::Agreement& at(std::uint64_t number);
  void send(std::uint64_t number, agreement::Agreement& agreement);

  Group& group_;
  std::mutex mutex_;
  std::map<std::uint64_t, agreement::Agreement> agreements_;
  std::uint64_t next_number_ = 0;  // of this member's calls
  agreement::RankSet lost_, dead_;
};

}  // namespace shoal
