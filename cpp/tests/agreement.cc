// Agreements of members that crash, leave, lose each other and vote late, in simulated time.
//
// One round is one agreement.  Its seed determines the size of the group, when each member votes, crashes,
// detects losses and receives messages, and which links are cut.  Messages of one link stay in order.  A
// single thread runs everything, so a seed repeats the same round.

#include "consensus/agreement.h"

#include <algorithm>
#include <queue>
#include <set>
#include <string>
#include <vector>

#include "tests/scenes.h"
#include "tests/support.h"

namespace shoal::stress {
namespace {

using namespace shoal::consensus;
using Time = std::int64_t;

constexpr Time kVoteTimeout = 500, kLossSettleTime = 100, kBallotRetryTime = 40;
constexpr Time kCalmSettle = 1000, kPrompt = 120;  // far more than an agreement's messages take; the most
constexpr Time kLastDeadline = 100000, kEnd = 200000;

// Properties of some rounds.
struct Kind {
  bool calm = false;     // all losses are certain deaths and soon known; late votes are very late
  bool clean = false;    // no member dies, all votes are in time, one cut divides the group in two
  bool pairs = false;    // no member dies, and all vote in time, after they have detected all cuts
  bool witness = false;  // the witness answers
  bool quiet() const { return calm || clean || pairs; }
};

enum class What { kVote, kMessage, kCrash, kLeave, kLoss, kDeath, kCut, kTick, kAsk, kAnswer };

struct Event {
  Time time;
  std::uint64_t order;
  What what;
  int at = 0;                                   // the affected member
  int other = 0;                                // the sender, or the lost member
  std::shared_ptr<const Message> message = {};  // none: the goodbye of the sender
  std::shared_ptr<const WitnessRequest> request = {};
  std::shared_ptr<const WitnessAnswer> answer = {};
  bool operator>(const Event& than) const {
    return time != than.time ? time > than.time : order > than.order;
  }
};

struct Member {
  Member(const Settings& settings) : agreement(settings), lost(settings.size), told(settings.size) {}
  Agreement agreement;
  Vote vote;
  Time deadline = 0;
  bool voted = false;
  bool in_time = false;
  bool alive = true;
  bool left = false;    // in good order; its decision counts
  RankSet lost;         // the losses that it was notified of
  RankSet told;         // the deaths that it was notified of
  int sends_left = -1;  // messages until it crashes; -1: it does not crash
  Time tick = -1;       // the requested time of its next tick
  bool decided = false;
};

class Round {
 public:
  Round(std::uint64_t seed, QuorumRule rule);
  // Returns whether two members that were alive at the same time decided differently.
  bool run();
  // Whether a dead member had decided differently from a surviving one.
  bool differed_from_the_dead() const { return differed_; }
  bool decided() const { return decided_; }

 private:
  Kind random_kind();
  void plan_votes();
  void plan_crashes();
  void plan_losses();
  void cut(int a, int b, Time time);
  void push(Time time, What what, int at, int other = 0) { queue_.push({time, ++order_, what, at, other}); }
  Time delay() { return delay(slow_); }
  Time delay(Time longest);
  void handle(const Event& event);
  void crash(int rank);
  void leave(int rank);
  void lose(int at, int other, bool dead);
  void deliver(const Event& event);
  void flush(int rank);
  void transmit(int from, int to, const std::shared_ptr<const Message>& message);
  void look(int rank);
  void end_side(int rank);
  void check_pairs();
  void check_end();
  std::string spoilt(std::string bytes);
  void spoil(const std::string& honest, const Receiver& receiver);
  Member& member(int rank) { return members_[rank]; }
  std::size_t link(int from, int to) const { return static_cast<std::size_t>(from * size_ + to); }
  Time between(Time from, Time to) { return std::uniform_int_distribution<Time>(from, to)(random_); }

  Random random_;
  const bool strict_;  // false for a wrong rule: only disagreements are counted
  int size_;
  Kind kind_;
  bool same_ = true;    // all vote with one op
  bool grows_ = false;  // this op is kGrow
  bool coded_;          // messages are encoded, and hostile ones are added
  bool fatal_;          // a member often crashes soon after it has decided, together with its side
  Time slow_;           // the longest usual delay
  int certainty_;       // number of deaths out of ten that are known to be deaths
  std::vector<Member> members_;
  std::vector<Time> longest_;  // by link: maximum usual delay
  std::vector<Time> arrival_;  // by link: of the last message
  std::vector<bool> is_cut_;   // by link
  std::vector<int> side_;      // by rank: side of a cut through the group; a side can end together
  std::priority_queue<Event, std::vector<Event>, std::greater<>> queue_;
  std::uint64_t order_ = 0;
  Time now_ = 0, news_ = 0, last_decision_ = 0;  // news: a vote, a death, or a report of a loss
  int sent_ = 0;                                 // messages
  Witness witness_;
  bool differed_ = false, decided_ = false, disagreed_ = false;
};

Round::Round(std::uint64_t seed, QuorumRule rule)
    : random_(seed),
      strict_(rule == safe_quorum),
      size_(chance(random_, 20) ? pick(random_, 8, 70) : pick(random_, 1, 7)),
      kind_(random_kind()),
      coded_(chance(random_, 8)),
      fatal_(!kind_.clean && !kind_.pairs && chance(random_, 4)),
      slow_(chance(random_, 3) ? 300 : 20),
      certainty_(pick(random_, 0, 10)),
      longest_(size_ * size_, slow_),
      arrival_(size_ * size_, 0),
      is_cut_(size_ * size_, false),
      side_(size_, 0) {
  if (kind_.quiet()) longest_.assign(longest_.size(), slow_ = 20);
  for (Time& longest : longest_)
    if (!kind_.quiet() && chance(random_, 4)) longest = 1000;
  for (int& side : side_) side = pick(random_, 0, 1);
  if (kind_.calm) certainty_ = 10;
  for (int rank = 0; rank < size_; ++rank)
    members_.emplace_back(Settings{rank, size_, kVoteTimeout, kind_.calm ? kCalmSettle : kLossSettleTime,
                                   kBallotRetryTime, rule});
  plan_votes();
  if (!kind_.clean && !kind_.pairs) plan_crashes();
  if (!kind_.calm) plan_losses();
}

Kind Round::random_kind() {
  const int kind = pick(random_, 0, 9);
  return {kind < 2, kind == 2, kind == 3, !chance(random_, 3)};
}

Time Round::delay(Time longest) {
  if (!kind_.quiet() && chance(random_, 30)) return between(1, 3000);
  return between(1, longest);
}

void Round::plan_votes() {
  const bool same = !chance(random_, 20);
  const auto op = static_cast<Op>(pick(random_, 1, 9));
  for (int rank = 0; rank < size_; ++rank) {
    Vote& vote = member(rank).vote;
    vote.op = same ? op : static_cast<Op>(pick(random_, 1, 9));
    std::set<std::uint64_t> integers;
    for (int i = vote.op == Op::kCommon ? pick(random_, 0, 5) : 1; i > 0; --i)
      integers.insert(vote.op == Op::kCommon ? between(0, 9) : random_());
    for (std::uint64_t integer : integers) vote.value.append(reinterpret_cast<const char*>(&integer), 8);
    if (gathers(vote.op)) vote.value.resize(pick(random_, 0, 20), 'x');
    const bool in_time = kind_.clean || kind_.pairs || !chance(random_, 10);
    const Time time = in_time ? between(kind_.pairs ? 100 : 0, 200) : between(kind_.calm ? 2000 : 0, 4000);
    member(rank).in_time = in_time;
    member(rank).deadline = kind_.quiet() ? kLastDeadline : time + between(1000, 6000);
    if (in_time || !chance(random_, 3)) push(time, What::kVote, rank);
    if (!kind_.quiet() && chance(random_, 10)) push(between(0, 1500), What::kLeave, rank);
  }
  const Op first = member(0).vote.op;
  same_ = std::ranges::all_of(members_, [&](const Member& m) { return m.vote.op == first; });
  grows_ = same_ && first == Op::kGrow;
}

void Round::plan_crashes() {
  if (chance(random_, 4)) return;
  const int crashes = pick(random_, 0, size_);
  for (int i = 0; i < crashes; ++i) {
    const int rank = pick(random_, 0, size_ - 1);
    if (chance(random_, 2))
      member(rank).sends_left = pick(random_, 0, 4 * size_);
    else
      push(between(0, 800), What::kCrash, rank);
  }
}

// Cuts links between two members, between one and all others, or between two parts of the group, of which one
// member may still reach both.
void Round::plan_losses() {
  if (!kind_.quiet() && chance(random_, 4)) return;
  if (kind_.clean || (!kind_.pairs && chance(random_, 2))) {
    const Time time = between(0, 600);
    const int bridge = kind_.clean || chance(random_, 2) ? -1 : pick(random_, 0, size_ - 1);
    for (int a = 0; a < size_; ++a)
      for (int b = 0; b < a; ++b)
        if (a != bridge && b != bridge && side_[a] != side_[b]) cut(a, b, time);
  }
  if (kind_.clean) return;
  for (int cuts = pick(random_, 0, 3); cuts > 0; --cuts) {
    const int a = pick(random_, 0, size_ - 1), b = pick(random_, 0, size_ - 1);
    if (!kind_.pairs && chance(random_, 4)) {
      const Time time = between(0, 800);
      for (int c = 0; c < size_; ++c) cut(a, c, time);
    } else {
      cut(a, b, kind_.pairs ? 0 : between(0, 800));
    }
  }
}

// Each side detects the cut at a different time; sometimes nothing is cut, and only one side detects a loss.
void Round::cut(int a, int b, Time time) {
  if (a == b) return;
  queue_.push({time, ++order_, What::kCut, a, b});
  const Time longest = kind_.quiet() ? 80 : 1000;
  push(time + between(1, longest), What::kLoss, a, b);
  push(time + between(1, longest), What::kLoss, b, a);
}

// A member that receives the goodbye has read all earlier messages.
void Round::leave(int rank) {
  member(rank).agreement.inform_all();
  flush(rank);
  if (!member(rank).alive) return;
  member(rank).left = true;
  for (int other = 0; other < size_; ++other)
    if (other != rank && !member(rank).lost.has(other)) transmit(rank, other, nullptr);
}

void Round::crash(int rank) {
  if (!member(rank).alive || member(rank).left) return;
  member(rank).alive = false;
  for (int other = 0; other < size_; ++other) {
    if (other == rank) continue;
    const bool certain = pick(random_, 1, 10) <= certainty_;
    const Time heard = now_ + between(0, kind_.calm ? 80 : chance(random_, 2) ? 20 : 600);
    if (kind_.calm && chance(random_, 3)) push(heard - between(0, heard - now_), What::kLoss, other, rank);
    push(heard, certain ? What::kDeath : What::kLoss, other, rank);
    if (!certain && chance(random_, 2)) push(heard + between(0, 1000), What::kDeath, other, rank);
  }
}

bool Round::run() {
  while (!queue_.empty() && now_ < kEnd) {
    const Event event = queue_.top();
    queue_.pop();
    now_ = event.time;
    handle(event);
  }
  if (strict_) check_end();
  return disagreed_;
}

void Round::handle(const Event& event) {
  if (event.what == What::kAsk) {  // the request is in flight, although its sender may have died
    const std::string kept = witness_.bytes(size_);
    check(!coded_ || witness_.read(kept, size_) == nullptr, "what the witness keeps is refused");
    if (coded_) {  // any process with access to the store can write anything
      Witness victim;
      if (victim.read(spoilt(kept), size_) == nullptr) victim.ask(*event.request);
    }
    Event reply{now_ + delay(), ++order_, What::kAnswer, event.at};
    reply.answer = std::make_shared<const WitnessAnswer>(witness_.ask(*event.request));
    queue_.push(std::move(reply));
    return;
  }
  if (event.what == What::kCut) {
    is_cut_[link(event.at, event.other)] = is_cut_[link(event.other, event.at)] = true;
    return;
  }
  Member& self = member(event.at);
  if (!self.alive || self.left) return;
  using enum What;
  if (event.what == kVote || event.what == kCrash || event.what == kLoss || event.what == kDeath)
    news_ = now_;
  switch (event.what) {
    case What::kVote:
      self.voted = true;
      self.agreement.vote(self.vote, self.deadline, now_);
      break;
    case What::kMessage:
      deliver(event);
      break;
    case What::kCrash:
      return crash(event.at);
    case What::kLeave:
      return leave(event.at);
    case What::kLoss:
    case What::kDeath:
      lose(event.at, event.other, event.what == What::kDeath);
      break;
    case What::kAnswer:
      self.agreement.answer(*event.answer, now_);
      break;
    default:
      if (self.tick != now_) return;
      self.tick = -1;
      self.agreement.tick(now_);
  }
  look(event.at);
  flush(event.at);
}

void Round::lose(int at, int other, bool dead) {
  check(!dead || !member(other).alive, "a running member is reported as dead");
  member(at).lost.add(other);
  member(at).agreement.lose(other, dead, now_);
  // A link has two ends: the other one detects the loss too.
  if (!is_cut_[link(at, other)] && member(other).alive) {
    is_cut_[link(at, other)] = is_cut_[link(other, at)] = true;
    push(now_ + delay(), What::kLoss, other, at);
  }
}

void Round::deliver(const Event& event) {
  if (!event.message) {
    if (member(event.at).lost.has(event.other)) return;
    member(event.at).lost.add(event.other);
    return member(event.at).agreement.lose(event.other, true, now_);
  }
  Message message;
  const Receiver receiver{size_, event.at, event.other};
  if (!coded_) return member(event.at).agreement.receive(event.other, *event.message, now_);
  const std::string bytes = encode(*event.message, size_);
  check(bytes.size() <= message_limit(size_), "a message is longer than messages can be");
  const char* flaw = decode(bytes, receiver, message);
  check(flaw == nullptr, std::string("a message is refused: ") + (flaw ? flaw : ""));
  check(message == *event.message, "a message changes on its way");
  member(event.at).agreement.receive(event.other, message, now_);
  spoil(bytes, receiver);
}

std::string Round::spoilt(std::string bytes) {
  for (int i = pick(random_, 1, 3); i > 0; --i) {
    const auto at = static_cast<std::size_t>(pick(random_, 0, static_cast<int>(bytes.size()) - 1));
    bytes[at] = static_cast<char>(chance(random_, 2) ? bytes[at] ^ (1 << pick(random_, 0, 7))
                                                     : pick(random_, 0, 255));
  }
  if (chance(random_, 4)) bytes.resize(pick(random_, 0, static_cast<int>(bytes.size())));
  return bytes;
}

// Another member must handle everything that `decode` accepts of a manipulated message.
void Round::spoil(const std::string& honest, const Receiver& receiver) {
  const std::string bytes = spoilt(honest);
  Message message;
  if (decode(bytes, receiver, message) != nullptr) return;
  check(decode(encode(message, size_), receiver, message) == nullptr, "what was accepted once is refused");
  Agreement victim({receiver.rank, size_, kVoteTimeout, kLossSettleTime, kBallotRetryTime});
  victim.vote(member(receiver.rank).vote, kEnd, 0);
  victim.receive(receiver.sender, message, 1);
  victim.tick(kVoteTimeout * 2);
  for (const Broadcast& broadcast : victim.take_messages())
    for (int to : broadcast.to) check(to >= 0 && to < size_ && to != receiver.rank, "a message goes nowhere");
}

void Round::flush(int rank) {
  Member& self = member(rank);
  for (const Broadcast& broadcast : self.agreement.take_messages()) {
    for (int to : broadcast.to) {
      if (self.sends_left == 0) return crash(rank);
      if (self.sends_left > 0) --self.sends_left;
      check(!self.lost.has(to), "a message goes to a lost member");
      transmit(rank, to, broadcast.message);
    }
  }
  if (auto request = self.agreement.take_request(); request && kind_.witness) {
    Event asks{now_ + delay(), ++order_, What::kAsk, rank};
    asks.request = std::make_shared<const WitnessRequest>(*request);
    queue_.push(std::move(asks));
  }
  const Time tick = self.agreement.next_tick();
  if (tick == Agreement::kNever || tick == self.tick) return;
  check(tick > now_, "a member requests a tick in the past");
  self.tick = tick;
  push(tick, What::kTick, rank);
}

void Round::transmit(int from, int to, const std::shared_ptr<const Message>& message) {
  ++sent_;
  if (is_cut_[link(from, to)]) return;
  Time& last = arrival_[link(from, to)];
  last = std::max(last + 1, now_ + delay(longest_[link(from, to)]));
  queue_.push({last, ++order_, What::kMessage, to, from, message});
}

// Called after each event of a member.
void Round::look(int rank) {
  Member& self = member(rank);
  const auto& decision = self.agreement.decision();
  if (!decision || self.decided) return;
  self.decided = decided_ = true;
  last_decision_ = now_;
  if (fatal_ && chance(random_, 2)) end_side(rank);
  if (!kind_.quiet() && chance(random_, 6)) push(now_ + between(0, 20), What::kLeave, rank);
  for (const Member& other : members_) {
    if (!other.decided || *other.agreement.decision() == *decision) continue;
    (other.alive ? disagreed_ : differed_) = true;
    check(!other.alive || !strict_, "two surviving members decide differently");
  }
  if (!strict_) return;
  std::vector<std::pair<int, const Vote*>> votes;
  for (int voter : decision->ranks.list()) {
    check(member(voter).voted, "a decision has a member that did not vote");
    votes.emplace_back(voter, &member(voter).vote);
  }
  check(*decision == combine(size_, votes), "a decision is not what its members' votes make");
}

void Round::end_side(int rank) {
  const Time longest = chance(random_, 2) ? 20 : 300;
  const bool all = chance(random_, 2);
  for (int other = 0; other < size_; ++other)
    if (side_[other] == side_[rank] && (all || chance(random_, 2)))
      push(now_ + between(0, longest), What::kCrash, other);
}

void Round::check_pairs() {
  int reached = 0;  // number of ranks that rank 0 reaches
  for (int rank = 0; rank < size_; ++rank) reached += !is_cut_[link(0, rank)];
  for (int rank = 0; rank < size_; ++rank) {
    const auto& agreement = member(rank).agreement;
    const bool alone = is_cut_[link(0, rank)];
    check(2 * reached <= size_ || alone || agreement.outcome() != Outcome::kNoQuorum,
          "a member waits in vain for a leader with a majority");
    for (int other = 0; other < size_ && !agreement.decision(); ++other)
      check(is_cut_[link(rank, other)] || !member(other).agreement.decision(),
            "a member does not receive a decision");
    if (!agreement.decision()) continue;
    const Decision& decision = *agreement.decision();
    bool was_cut = false;
    for (int other = 0; other < size_; ++other) {
      const bool apart = is_cut_[link(rank, other)];
      was_cut |= apart;
      check(!apart || decision.op == Op::kDiffers || !decision.keeps(rank) || !decision.keeps(other),
            "two go on that have lost one another");
    }
    check(was_cut || decision.keeps(rank), "a member is left out that has lost nobody");
  }
}

void Round::check_end() {
  if (kind_.pairs) check_pairs();
  const bool undisturbed =
      kind_.calm && std::ranges::all_of(members_, [](const Member& m) { return m.alive && m.in_time; });
  check(!undisturbed || sent_ == 4 * (size_ - 1) || (!same_ && sent_ < 4 * (size_ - 1)),
        "an agreement without a loss takes more messages than four each");
  const bool prompt = std::ranges::all_of(members_, [](const Member& m) { return !m.alive || m.in_time; });
  check(!kind_.calm || !prompt || last_decision_ <= news_ + kPrompt,
        "an agreement takes longer than its messages, though all votes and deaths are known");
  const auto silent = [](const Member& m) { return m.alive && !m.left && !m.voted; };
  const bool one_is_silent = std::ranges::any_of(members_, silent);
  // Members that died may have voted with another op before.
  const bool survivors_grow = std::ranges::all_of(
      members_, [](const Member& m) { return !m.alive || m.left || !m.voted || m.vote.op == Op::kGrow; });
  int sides[2] = {0, 0};
  for (int side : side_) ++sides[side];
  for (int rank = 0; rank < size_; ++rank) {
    const Member& self = member(rank);
    if (!self.alive || self.left || !self.voted) continue;
    const Outcome outcome = self.agreement.outcome();
    check(outcome != Outcome::kOpen, "a member waits for ever");
    const bool has = self.agreement.decision().has_value();
    const bool goes_on = has && self.agreement.decision()->keeps(rank);
    check(outcome == Outcome::kNoQuorum || (has && goes_on == (outcome == Outcome::kDecided)),
          "an outcome is not that of the decision");
    check(!kind_.calm || outcome == Outcome::kDecided ||
              (survivors_grow && one_is_silent && outcome == Outcome::kNoQuorum) ||
              (!grows_ && !self.in_time && outcome == Outcome::kLeftOut),
          "all deaths are certain, and a member does not go on");
    if (!kind_.clean) continue;
    const int mine = sides[side_[rank]];
    check(2 * mine <= size_ || outcome == Outcome::kDecided, "a member of a majority does not go on");
    check(2 * mine != size_ || !kind_.witness || outcome != Outcome::kNoQuorum, "the witness does not help");
  }
}

// Wrong rules that look right: the test must detect them.
Quorum majority_of_those_not_known_dead(const Standing& standing) {
  return 2 * standing.living > standing.size - standing.dead ? Quorum::kYes : Quorum::kNo;
}
Quorum no_quorum(const Standing& standing) {
  return standing.answered + standing.lost == standing.size ? Quorum::kYes : Quorum::kNo;
}
}  // namespace

void agree(std::uint64_t seed, Tally& tally) {
  Round round(seed, safe_quorum);
  round.run();
  if (round.decided()) ++tally.collectives;
  if (round.differed_from_the_dead()) ++tally.failures;
}

std::array<bool, 2> disagree(std::uint64_t seed) {
  return {Round(seed, majority_of_those_not_known_dead).run(), Round(seed, no_quorum).run()};
}

}  // namespace shoal::stress
