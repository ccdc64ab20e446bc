// The leader's part of an agreement.

#include <algorithm>

#include "consensus/agreement.h"

namespace shoal::consensus {

void Agreement::lead() {
  if (retry_ && now_ >= retry_->first) {
    outbid_ = std::max(outbid_, retry_->second);
    retry_.reset();
  }
  if (phase_ == Phase::kFollows || std::max(promised_, outbid_) > ballot_) begin_ballot();
  if (phase_ == Phase::kPrepares && answered()) phase_ = Phase::kWaits;
  if (phase_ == Phase::kWaits) propose();
  if (phase_ == Phase::kProposes && answered()) return decide(*proposal_, everyone_);
  if (retry_) wake_at(retry_->first);
}

void Agreement::begin_ballot() {
  const auto size = static_cast<std::uint64_t>(settings_.size),
             rank = static_cast<std::uint64_t>(settings_.rank);
  if (retry_) outbid_ = std::max(outbid_, retry_->second);
  retry_.reset();
  const std::uint64_t above = std::max({promised_, outbid_, ballot_});
  const bool first = phase_ == Phase::kFollows && rank == 0 && above == 0;
  const std::uint64_t next = first ? 0 : above / size * size + rank + (above % size < rank ? 0 : size);
  if (next >= kBallotLimit) return;
  ballot_ = promised_ = next;
  leads_since_ = now_;
  highest_ = accepted_;
  proposal_.reset();
  request_.reset();
  last_request_.reset();
  witness_granted_ = false;
  for (Follower& follower : followers_) follower.drops.reset();
  asked_with_ = dead_;
  phase_ = first ? Phase::kWaits : Phase::kPrepares;
  if (!first) ask_again();
}

void Agreement::ask_again() {
  asked_with_ = dead_;
  RankSet to = everyone_ - lost_;
  to.remove(settings_.rank);
  const bool proposes = phase_ == Phase::kProposes;
  Message message = make(proposes ? MessageType::kPropose : MessageType::kPrepare, ballot_);
  if (proposes) message.decision = proposal_;
  send(to, std::move(message));
}

void Agreement::on_answer(int from, const Message& message) {
  using enum MessageType;
  Follower& follower = followers_[from];
  if (message.type != kAccept) {
    if (!follower.vote) follower.vote = message.vote;
    if (follower.lost != message.lost) losses_changed_ = now_;
    follower.lost = message.lost;
  }
  if (message.type == kVote) {
    outbid_ = std::max(outbid_, message.ballot);
    return;
  }
  const Phase expects = message.type == kState ? Phase::kPrepares : Phase::kProposes;
  if (phase_ == Phase::kFollows || message.ballot != ballot_ || phase_ != expects) return;
  follower.drops = message.dead;
  if (message.type == kState && message.decision && (!highest_ || highest_->ballot < message.accepted))
    highest_ = Accepted{message.accepted, *message.decision};
}

Standing Agreement::standing() const {
  RankSet answered(settings_.size);
  answered.add(settings_.rank);
  for (int rank = 0; rank < settings_.size; ++rank)
    if (followers_[rank].drops) answered.add(rank);
  const RankSet missing = everyone_ - answered, living = answered - dead_;
  Standing result;
  result.size = settings_.size;
  result.answered = answered.count();
  result.living = living.count();
  result.lost = (missing & lost_).count();
  if (!missing.within(lost_)) return result;
  RankSet dead = dead_;
  for (int rank : living.list())
    if (rank != settings_.rank) dead &= *followers_[rank].drops;
  result.dead = dead.count();
  return result;
}

// Whether a quorum has answered in this phase.
bool Agreement::answered() {
  const Quorum quorum = settings_.quorum(standing());
  if (quorum == Quorum::kYes || (quorum == Quorum::kWithWitness && witness_granted_)) return true;
  if (quorum == Quorum::kWithWitness) ask_witness();
  if (asked_with_ != dead_) ask_again();
  return false;
}

void Agreement::ask_witness() {
  WitnessRequest request{ballot_, proposal_};
  if (last_request_ == request || retry_) return;
  request_ = last_request_ = std::move(request);
}

void Agreement::answer(const WitnessAnswer& answer, std::int64_t now) {
  now_ = now;
  const bool expected = !decision_ && last_request_ && last_request_->ballot == answer.ballot &&
                        last_request_->decision.has_value() == answer.accepts;
  if (expected && answer.granted) {
    witness_granted_ = true;
    if (!answer.accepts && answer.accepted && (!highest_ || highest_->ballot < answer.accepted->ballot))
      highest_ = answer.accepted;
  } else if (expected && !retry_) {
    // A higher rank waits longer, so that two leaders do not outbid each other forever.
    retry_ = {now + settings_.retry * ++tries_ * (settings_.rank + 1), answer.promised};
  }
  advance();
}

void Agreement::propose() {
  proposal_ = highest_ ? highest_->decision : count_votes();
  if (!proposal_) return;
  phase_ = Phase::kProposes;
  witness_granted_ = false;
  for (Follower& follower : followers_) follower.drops.reset();
  accepted_ = Accepted{ballot_, *proposal_};
  ask_again();
}

RankSet Agreement::voters() const {
  RankSet result(settings_.size);
  for (int rank = 0; rank < settings_.size; ++rank)
    if (followers_[rank].vote && !lost_.has(rank)) result.add(rank);
  return result;
}

// Makes the decision from the votes; nothing while missing votes may still arrive.  Votes with different ops
// are decided immediately, because further votes cannot make them equal.
std::optional<Decision> Agreement::count_votes() {
  const RankSet voters = this->voters();
  if (!voters.any()) return std::nullopt;
  const auto op_of = [&](int rank) { return followers_[rank].vote->op; };
  const Op op = op_of(voters.lowest());
  if (std::ranges::any_of(voters.list(), [&](int rank) { return op_of(rank) != op; })) return combine(voters);
  if (voters != everyone_ - lost_) {
    if (op == Op::kGrow) return std::nullopt;
    const std::int64_t until = std::max(*begun_ + settings_.vote_timeout, leads_since_ + settings_.settle);
    if (now_ < until) {
      wake_at(until);
      return std::nullopt;
    }
  }
  const RankSet dropped = mutual_losses(voters);
  if (const std::int64_t until = losses_changed_ + settings_.settle; dropped.any() && now_ < until) {
    wake_at(until);
    return std::nullopt;
  }
  return combine(voters - dropped);
}

Decision Agreement::combine(const RankSet& voters) const {
  std::vector<std::pair<int, const Vote*>> votes;
  for (int rank : voters.list()) votes.emplace_back(rank, &*followers_[rank].vote);
  return consensus::combine(settings_.size, votes);
}

// Ranks to leave out because voters have lost each other, although this member has lost neither: repeatedly
// the rank with the most such losses (the higher rank if equal), until no such losses remain.
RankSet Agreement::mutual_losses(const RankSet& voters) const {
  const auto size = static_cast<std::size_t>(settings_.size);
  std::vector<RankSet> apart(size, RankSet(settings_.size));
  for (int a : voters.list()) {
    for (int b : (followers_[a].lost & voters).list()) {
      apart[a].add(b);
      apart[b].add(a);
    }
  }
  std::vector<int> count(size);
  for (std::size_t rank = 0; rank < size; ++rank) count[rank] = apart[rank].count();
  RankSet result(settings_.size);
  for (;;) {
    std::size_t worst = 0;
    for (std::size_t rank = 0; rank < size; ++rank)
      if (count[rank] >= count[worst]) worst = rank;
    if (count[worst] == 0) return result;
    result.add(static_cast<int>(worst));
    count[worst] = 0;
    for (int other : apart[worst].list()) {
      apart[other].remove(static_cast<int>(worst));
      --count[other];
    }
    apart[worst] = RankSet(settings_.size);
  }
}

}  // namespace shoal::consensus
