#include "consensus/agreement.h"

#include <algorithm>

namespace shoal::consensus {

Agreement::Agreement(const Settings& settings)
    : settings_(settings),
      everyone_(RankSet::all(settings.size)),
      lost_(settings.size),
      dead_(settings.size),
      waiting_for_decision_(settings.size),
      informed_(settings.size),
      leaders_(settings.size),
      followers_(settings.size, Follower{{}, RankSet(settings.size), {}}),
      asked_with_(settings.size) {}

void Agreement::vote(Vote vote, std::int64_t deadline, std::int64_t now) {
  now_ = now;
  if (!begun_) begun_ = now;
  deadline_ = deadline;
  followers_[settings_.rank].vote = std::move(vote);
  if (decision_) outcome_ = decision_->keeps(settings_.rank) ? Outcome::kDecided : Outcome::kLeftOut;
  advance();
}

void Agreement::receive(int from, const Message& message, std::int64_t now) {
  now_ = now;
  if (lost_.has(from)) return;
  if (!begun_) begun_ = now;
  merge_dead(message.dead);
  using enum MessageType;
  if (message.type == kVote || message.type == kPrepare) waiting_for_decision_.add(from);
  if (decision_) {
    RankSet whom(settings_.size);
    whom.add(from);
    if (message.type != kAccept && message.type != kDecide) tell(whom);
    return;
  }
  if (message.type == kPrepare) on_prepare(from, message);
  if (message.type == kPropose) on_propose(from, message);
  if (message.type == kDecide) on_decide(from, message);
  if (message.type == kVote || message.type == kState || message.type == kAccept) on_answer(from, message);
  advance();
}

void Agreement::lose(int rank, bool dead, std::int64_t now) {
  now_ = now;
  if (!lost_.has(rank)) losses_changed_ = now;
  lost_.add(rank);
  if (dead) dead_.add(rank);
  advance();
}

void Agreement::tick(std::int64_t now) {
  now_ = now;
  advance();
}

void Agreement::inform_all() {
  if (decision_) tell(everyone_);
}

std::int64_t Agreement::next_tick() const {
  return outcome_ == Outcome::kOpen ? std::min(wake_, deadline_) : wake_;
}

void Agreement::advance() {
  wake_ = kNever;
  const bool voted = followers_[settings_.rank].vote.has_value();
  if (voted && outcome_ == Outcome::kOpen && now_ >= deadline_) outcome_ = Outcome::kNoQuorum;
  if (decision_ || !begun_) return;
  if (leader() == settings_.rank)
    lead();
  else
    follow();
}

void Agreement::on_prepare(int from, const Message& message) {
  leaders_.add(from);
  if (message.ballot < promised_) return;
  promised_ = message.ballot;
  Message state = make(MessageType::kState, promised_);
  state.lost = lost_;
  state.vote = followers_[settings_.rank].vote;
  if (accepted_) {
    state.accepted = accepted_->ballot;
    state.decision = accepted_->decision;
  }
  send(from, std::move(state));
}

void Agreement::on_propose(int from, const Message& message) {
  if (message.ballot < promised_) return;
  promised_ = message.ballot;
  accepted_ = Accepted{message.ballot, *message.decision};
  send(from, make(MessageType::kAccept, promised_));
}

void Agreement::on_decide(int from, const Message& message) {
  informed_.add(from);
  decide(*message.decision, waiting_for_decision_);
}

// Sends this member's vote and losses, and a promise to another leader, to the leader when they change.
// Sends vote and losses to other members that lead because they have lost that leader.
void Agreement::follow() {
  const Follower& self = followers_[settings_.rank];
  const int leader = this->leader();
  const auto owner = static_cast<int>(promised_ % static_cast<std::uint64_t>(settings_.size));
  if (!self.vote && (promised_ == 0 || owner == leader)) return;
  Message message = make(MessageType::kVote, 0);
  message.lost = lost_;
  message.vote = self.vote;
  const std::uint64_t promised = owner == leader ? 0 : promised_;
  if (const bool changed = last_vote_.message != message;
      changed || last_vote_.leader != leader || last_vote_.promised != promised) {
    if (changed) {
      RankSet others = leaders_ - lost_;
      others.remove(leader);
      send(others, message);
    }
    last_vote_ = {leader, promised, message};
    message.ballot = promised;
    send(leader, std::move(message));
  }
}

// Adopts the deaths that others know of.
void Agreement::merge_dead(const RankSet& dead) {
  if (dead.within(dead_)) return;
  if (!dead.within(lost_)) losses_changed_ = now_;
  dead_ |= dead;
  lost_ |= dead;
}

void Agreement::decide(const Decision& decision, const RankSet& whom) {
  decision_ = decision;
  const bool voted = followers_[settings_.rank].vote.has_value();
  if (voted && outcome_ == Outcome::kOpen)
    outcome_ = decision.keeps(settings_.rank) ? Outcome::kDecided : Outcome::kLeftOut;
  wake_ = kNever;
  request_.reset();
  tell(whom);
}

void Agreement::tell(const RankSet& whom) {
  RankSet to = whom - lost_ - informed_;
  to.remove(settings_.rank);
  informed_ |= to;
  Message message = make(MessageType::kDecide, 0);
  message.decision = decision_;
  send(to, std::move(message));
}

Message Agreement::make(MessageType type, std::uint64_t ballot) const {
  return {type, ballot, RankSet(settings_.size), dead_, std::nullopt, 0, std::nullopt};
}

void Agreement::send(const RankSet& to, Message message) {
  if (to.any()) messages_.push_back({to.list(), std::make_shared<const Message>(std::move(message))});
}

void Agreement::send(int to, Message message) {
  messages_.push_back({{to}, std::make_shared<const Message>(std::move(message))});
}

}  // namespace shoal::consensus
