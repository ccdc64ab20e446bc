// How the members of a group agree on one value, and on who goes on, while some of them die.
//
// Single-decree Paxos, as a state machine of one member: no I/O, threads or clocks.  Whoever runs it brings
// the messages of the other members, the losses that it hears of, the local vote and the time, and sends what
// comes out.  Every member takes part as an acceptor, whether it has voted or not.
//
//   kVote -> leader;  kPropose -> all;  kAccept -> leader;  kDecide -> all
//
// The leader is the lowest rank that a member has not lost; members with different losses can have different
// leaders.  Rank 0 may propose at once, in ballot 0.  Every other leader asks first what has been accepted
// (kPrepare, kState), and proposes that again.  A leader whose ballot a follower cannot accept any more, and
// who learns that from the follower's kVote, begins a higher one; nobody else does, so leaders do not outbid
// one another for ever.
//
// What keeps two members that live from deciding differently is the quorum (quorum.h), and with it: frames of
// the lost are dropped, each answer names the dead that its sender drops, and who has decided answers with
// the decision alone.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "agreement/decision.h"
#include "agreement/message.h"
#include "agreement/quorum.h"
#include "agreement/rank_set.h"
#include "agreement/witness.h"

namespace shoal::agreement {

// Times in nanoseconds, of any clock that only grows.
struct Settings {
  int rank = 0;
  int size = 0;
  // After the first vote: how long a leader waits for those who live and have not voted, unless the op is
  // kGrow.
  std::int64_t vote_timeout = 0;
  // How long a leader waits for losses to become known to it: those that others tell of, and the states of
  // those that it has just begun to lead.
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
  kDecided,   // this member goes on with the others
  kLeftOut,   // the others go on without it
  kNoQuorum,  // the deadline has passed
  kClosed,    // this member has closed the group
};

// Not thread-safe.
class Agreement {
 public:
  static constexpr std::int64_t kNever = INT64_MAX;

  explicit Agreement(const Settings& settings);

  // -- what happens; `now` never goes back

  // This member's vote, once.  Without a decision by the deadline the outcome is kNoQuorum.
  void vote(Vote vote, std::int64_t deadline, std::int64_t now);
  // A message that `decode` has accepted.
  void receive(int from, const Message& message, std::int64_t now);
  // A member is lost to this one, for good; dead: there is certain evidence that it ended.  May be called
  // again when the evidence comes.
  void lose(int rank, bool dead, std::int64_t now);
  void answer(const WitnessAnswer& answer, std::int64_t now);
  // At next_tick(), or at any time.
  void tick(std::int64_t now);
  // This member leaves, and is dead to the others once they have read what it says now: a decision, if it
  // knows one.  Nothing is called any more but take_messages().
  void farewell();

  // -- what comes of it

  std::int64_t next_tick() const;
  std::vector<Broadcast> take_messages() { return std::exchange(messages_, {}); }
  // To be asked until there is an answer or another request; without a witness, to be forgotten.
  std::optional<WitnessRequest> take_request() { return std::exchange(request_, std::nullopt); }
  // Does not change any more once it is not kOpen.
  Outcome outcome() const { return outcome_; }
  // May be known before this member has voted, and after its deadline.
  const std::optional<Decision>& decision() const { return decision_; }

 private:
  // What a leader knows of a member.
  struct Follower {
    std::optional<Vote> vote;
    RankSet lost;                  // as it says
    std::optional<RankSet> drops;  // once it has answered this phase: the dead that it knew of
  };
  // The last kVote.
  struct Said {
    int leader = -1;
    std::uint64_t promised = 0;
    std::optional<Message> message = {};
  };
  enum class Phase { kFollows, kPrepares, kWaits, kProposes };

  // as any member (agreement.cc)
  void on_prepare(int from, const Message& message);
  void on_propose(int from, const Message& message);
  void on_decide(int from, const Message& message);
  void advance();
  int leader() const { return (everyone_ - lost_).lowest(); }
  void follow();
  void bury(const RankSet& dead);
  void decide(const Decision& decision, const RankSet& tell);
  void tell(const RankSet& whom);
  Message make(MessageType type, std::uint64_t ballot) const;
  void send(const RankSet& to, Message message);
  void send(int to, Message message);
  void wake_at(std::int64_t time) { wake_ = std::min(wake_, time); }

  // as the leader (leader.cc)
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
  RankSet complaints(const RankSet& voters) const;
  RankSet voters() const;

  const Settings settings_;
  const RankSet everyone_;
  std::int64_t now_ = 0;
  std::int64_t wake_ = kNever;
  std::vector<Broadcast> messages_;

  std::optional<std::int64_t> begun_;  // when the first vote or message came
  std::int64_t deadline_ = kNever;
  RankSet lost_;  // with the dead
  RankSet dead_;
  std::uint64_t promised_ = 0;
  std::optional<Accepted> accepted_;
  std::optional<Decision> decision_;
  Outcome outcome_ = Outcome::kOpen;
  RankSet asked_;    // those that wait for this member's word, if it learns of a decision
  RankSet told_;     // those that have been sent the decision
  RankSet leaders_;  // those that have asked for a promise
  Said said_;

  std::vector<Follower> followers_;  // by rank, this one too
  Phase phase_ = Phase::kFollows;
  std::uint64_t ballot_ = 0;
  std::uint64_t outbid_ = 0;         // the highest ballot of which followers told
  std::int64_t leads_since_ = 0;     // when the ballot began
  std::int64_t losses_changed_ = 0;  // when followers last told of losses, or this member heard of one
  std::optional<Accepted> highest_;  // of what followers and the witness had accepted
  std::optional<Decision> proposal_;
  RankSet asked_with_;  // the dead that were named when this phase's answers were last asked for
  std::optional<WitnessRequest> request_;
  std::optional<WitnessRequest> last_request_;
  bool witness_granted_ = false;
  int tries_ = 0;                                                // ballots that the witness has refused
  std::optional<std::pair<std::int64_t, std::uint64_t>> retry_;  // when, and what to outbid
};

}  // namespace shoal::agreement
