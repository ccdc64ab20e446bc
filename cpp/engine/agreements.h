// The agreements of one group: gives them the time, losses and frames, and sends what they say.
//
// Whichever thread has read a frame, or runs Group::check, answers it: none of them needs Python's lock.  The
// k-th call of a member belongs to the k-th of every other.  They work on groups that are open or broken, and
// end when this member closes the group: to the others it is then as good as dead, so before it says so it
// tells them what it knows to be decided.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "agreement/agreement.h"
#include "transport/frame.h"

namespace shoal {

class Group;

class Agreements {
 public:
  struct Rules {
    std::int64_t vote_timeout = 0;  // nanoseconds; see agreement::Settings
    bool believing = false;         // whether every loss is taken for a death
  };
  // What comes of an agreement.
  struct News {
    // kLeftOut also without a decision: this process was given up while it was stopped.
    agreement::Outcome outcome = agreement::Outcome::kOpen;
    std::optional<agreement::Decision> decision;
    std::optional<agreement::WitnessRequest> request;  // of the leader, each once; answer() brings the answer
  };

  Agreements(Group& group, const Rules& rules);

  // Begins this member's next agreement, to be decided within `timeout` nanoseconds; returns its number, or
  // nothing while the outcome of the one kKept before has not been told.
  std::optional<std::uint64_t> begin(agreement::Vote vote, std::int64_t timeout);
  // Waits until `until` for anything of this.  An outcome is told once.
  News wait(std::uint64_t number, std::int64_t until);
  // Whether a thread waits.
  bool awaited() const { return waiting_.load(std::memory_order_seq_cst) > 0; }
  void answer(std::uint64_t number, const agreement::WitnessAnswer& answer);
  // Who is lost, and who of these is certainly dead.
  std::pair<agreement::RankSet, agreement::RankSet> losses();

  // Returns the flaw of the frame of a member, in words; null if it has none.
  const char* on_frame(int rank, const FrameHeader& header, const std::string& text);
  // A member is lost; dead: certainly.
  void lose(int rank, bool dead);
  // A member has closed the group.
  void leave(int rank);
  // The next time to look is written to `next` if earlier.
  void check(std::int64_t now, std::int64_t& next);
  // Before the others hear that this member has closed the group.
  void close();

 private:
  static constexpr std::uint64_t kKept = 64;

  struct Entry {
    agreement::Agreement agreement;
    bool told = false;  // its outcome, to whoever waits
  };

  // All under the mutex, sending too: so what one agreement says stays in order.
  Entry& at(std::uint64_t number);
  void send(std::uint64_t number, agreement::Agreement& agreement);

  Group& group_;
  const Rules rules_;
  std::mutex mutex_;
  std::map<std::uint64_t, Entry> agreements_;
  std::uint64_t next_number_ = 0;  // of this member's calls
  bool closed_ = false;
  agreement::RankSet lost_, dead_;
  std::atomic<int> waiting_{0};  // threads
};

}  // namespace shoal
