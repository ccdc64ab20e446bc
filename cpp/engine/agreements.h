// The agreements of one group: passes time, losses and frames to them, and sends their messages.
//
// Frames are answered by the thread that read them or runs Group::check, without Python's lock.  A member's
// k-th call belongs to the k-th call of every other member.  Agreements work on open and broken groups.  They
// end when this member closes the group: then it is like dead for the others, so it first sends the decisions
// it knows.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "consensus/agreement.h"
#include "net/frame.h"

namespace shoal {

class Group;

class Agreements {
 public:
  struct Rules {
    std::int64_t vote_timeout = 0;   // nanoseconds; see consensus::Settings
    bool losses_are_deaths = false;  // whether every loss counts as a death
  };
  // The state of an agreement.
  struct Status {
    // kLeftOut also without a decision: this process was evicted while it was stopped.
    consensus::Outcome outcome = consensus::Outcome::kOpen;
    std::optional<consensus::Decision> decision;
    std::optional<consensus::WitnessRequest> request;  // on the leader, each once; reply with answer()
  };

  Agreements(Group& group, const Rules& rules);

  // Begins this member's next agreement, to be decided within `timeout` nanoseconds; returns its number, or
  // nothing while the outcome of the agreement kKept numbers before has not been fetched.
  std::optional<std::uint64_t> begin(consensus::Vote vote, std::int64_t timeout);
  // Waits until `until` for an outcome, a request, or the end of the group.
  Status wait(std::uint64_t number, std::int64_t until);
  // Whether a thread is waiting.
  bool has_waiters() const { return waiting_.load(std::memory_order_seq_cst) > 0; }
  void answer(std::uint64_t number, const consensus::WitnessAnswer& answer);
  // The lost members, and those of them that are certainly dead.
  std::pair<consensus::RankSet, consensus::RankSet> losses();

  // Handles a member's frame; returns a description of its flaw, or null.
  const char* on_frame(int rank, const FrameHeader& header, const std::string& text);
  // A member is lost; dead: its process has certainly ended.
  void lose(int rank, bool dead);
  // A member has closed the group.
  void leave(int rank);
  // Lowers `next` to the time of the next check.
  void check(std::int64_t now, std::int64_t& next);
  // Must be called before the other members are notified that this member has closed the group.
  void close();

 private:
  static constexpr std::uint64_t kKept = 64;

  struct Entry {
    consensus::Agreement agreement;
    bool fetched = false;  // its outcome was fetched by wait()
  };

  // All require the mutex, sending too, so that an agreement's messages stay in order.
  Entry& at(std::uint64_t number);
  void send(std::uint64_t number, consensus::Agreement& agreement);

  Group& group_;
  const Rules rules_;
  std::mutex mutex_;
  std::map<std::uint64_t, Entry> agreements_;
  std::uint64_t next_number_ = 0;  // of this member's calls
  bool closed_ = false;
  consensus::RankSet lost_, dead_;
  std::atomic<int> waiting_{0};  // threads
};

}  // namespace shoal
