// Agreement of a group's members on one value, and on the members that continue, while some of them die.
//
// Single-decree Paxos, as a state machine of one member without I/O, threads or clocks.  The caller passes in
// the other members' messages, losses, the local vote and the time, and sends the resulting messages.  Every
// member is an acceptor, whether it has voted or not.
//
//   kVote -> leader;  kPropose -> all;  kAccept -> leader;  kDecide -> all
//
// The leader is the lowest rank that a member has not lost; members with different losses can have different
// leaders.  Rank 0 may propose immediately, in ballot 0.  Every other leader first asks for accepted
// decisions (kPrepare, kState), and proposes the highest again.  A leader begins a higher ballot only when a
// follower's kVote shows that it cannot accept the leader's ballot, so that leaders do not outbid each other
// forever.
//
// Two surviving members never decide differently because of the quorum (quorum.h) and these rules: frames of
// lost members are dropped, each answer names the dead that its sender drops, and a member that has decided
// answers only with the decision.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "consensus/decision.h"
#include "consensus/message.h"
#include "consensus/quorum.h"
#include "consensus/rank_set.h"
#include "consensus/witness.h"

namespace shoal::consensus {

// Times in nanoseconds, of any monotonic clock.
struct Settings {
  int rank = 0;
  int size = 0;
  // How long after the first vote a leader waits for the votes of surviving members, unless the op is kGrow.
  std::int64_t vote_timeout = 0;
  // How long a leader waits for losses reported by others, and for the states of members it begins to lead.
  std::int64_t settle = 0;
  // How long a leader waits before it outbids another one at the witness, times the number of its tries.
  std::int64_t retry = 0;
  QuorumRule quorum = safe_quorum;
};

struct Broadcast {
  std::vector<int> to;
  std::shared_ptr<const Message> message;
};

enum class Outcome {
  kOpen,
  kDecided,   // this member continues with the others
  kLeftOut,   // the others continue without it
  kNoQuorum,  // the deadline has passed
  kClosed,    // this member has closed the group
};

// Not thread-safe.
class Agreement {
 public:
  static constexpr std::int64_t kNever = INT64_MAX;

  explicit Agreement(const Settings& settings);

  // -- inputs; `now` never decreases

  // This member's vote, once.  Without a decision by the deadline the outcome is kNoQuorum.
  void vote(Vote vote, std::int64_t deadline, std::int64_t now);
  // A message that was accepted by `decode`.
  void receive(int from, const Message& message, std::int64_t now);
  // This member has lost `rank`, permanently; dead: it has certainly ended (may be reported by another call).
  void lose(int rank, bool dead, std::int64_t now);
  void answer(const WitnessAnswer& answer, std::int64_t now);
  // At next_tick(), or at any time.
  void tick(std::int64_t now);
  // This member leaves, and counts as dead for the others after they have read the resulting messages (its
  // decision, if known).  Only take_messages() may be called afterwards.
  void inform_all();

  // -- outputs

  std::int64_t next_tick() const;
  std::vector<Broadcast> take_messages() { return std::exchange(messages_, {}); }
  // To be repeated until there is an answer or another request; to be ignored without a witness.
  std::optional<WitnessRequest> take_request() { return std::exchange(request_, std::nullopt); }
  // Final, unless kOpen.
  Outcome outcome() const { return outcome_; }
  // May be known before this member has voted, and after its deadline.
  const std::optional<Decision>& decision() const { return decision_; }

 private:
  // A leader's knowledge of a member.
  struct Follower {
    std::optional<Vote> vote;
    RankSet lost;                  // the losses it reported
    std::optional<RankSet> drops;  // its answer in this phase: the dead that it knew of
  };
  // The last kVote.
  struct LastVote {
    int leader = -1;
    std::uint64_t promised = 0;
    std::optional<Message> message = {};
  };
  enum class Phase { kFollows, kPrepares, kWaits, kProposes };

  // the part of every member (agreement.cc)
  void on_prepare(int from, const Message& message);
  void on_propose(int from, const Message& message);
  void on_decide(int from, const Message& message);
  void advance();
  int leader() const { return (everyone_ - lost_).lowest(); }
  void follow();
  void merge_dead(const RankSet& dead);
  void decide(const Decision& decision, const RankSet& tell);
  void tell(const RankSet& whom);
  Message make(MessageType type, std::uint64_t ballot) const;
  void send(const RankSet& to, Message message);
  void send(int to, Message message);
  void wake_at(std::int64_t time) { wake_ = std::min(wake_, time); }

  // the part of the leader (leader.cc)
  void lead();
  void begin_ballot();
  void on_answer(int from, const Message& message);
  Standing standing() const;
  bool answered();
  void ask_witness();
  void ask_again();
  void propose();
  std::optional<Decision> count_votes();
  Decision combine(const RankSet& voters) const;
  RankSet mutual_losses(const RankSet& voters) const;
  RankSet voters() const;

  const Settings settings_;
  const RankSet everyone_;
  std::int64_t now_ = 0;
  std::int64_t wake_ = kNever;
  std::vector<Broadcast> messages_;

  std::optional<std::int64_t> begun_;  // time of the first vote or message
  std::int64_t deadline_ = kNever;
  RankSet lost_;  // includes the dead
  RankSet dead_;
  std::uint64_t promised_ = 0;
  std::optional<Accepted> accepted_;
  std::optional<Decision> decision_;
  Outcome outcome_ = Outcome::kOpen;
  RankSet
      waiting_for_decision_;  // members that wait for a message of this member and must receive a decision
  RankSet informed_;          // members that were sent the decision
  RankSet leaders_;           // members that have asked for a promise
  LastVote last_vote_;

  std::vector<Follower> followers_;  // by rank, including this one
  Phase phase_ = Phase::kFollows;
  std::uint64_t ballot_ = 0;
  std::uint64_t outbid_ = 0;         // the highest ballot that followers have promised
  std::int64_t leads_since_ = 0;     // start of the ballot
  std::int64_t losses_changed_ = 0;  // time of the last loss reported by a follower or known to this member
  std::optional<Accepted> highest_;  // the highest that followers or the witness have accepted
  std::optional<Decision> proposal_;
  RankSet asked_with_;  // the dead named in the last request for this phase's answers
  std::optional<WitnessRequest> request_;
  std::optional<WitnessRequest> last_request_;
  bool witness_granted_ = false;
  int tries_ = 0;                                                // ballots that the witness has refused
  std::optional<std::pair<std::int64_t, std::uint64_t>> retry_;  // time, and ballot to outbid
};

}  // namespace shoal::consensus
