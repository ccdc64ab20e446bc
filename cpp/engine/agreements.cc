#include "engine/agreements.h"

#include <algorithm>

#include "common/clock.h"
#include "engine/context.h"
#include "engine/group.h"

namespace shoal {
namespace {

using namespace consensus;

constexpr std::int64_t kLossSettleTime =
    kSecond;  // time after which the members' views of losses rarely differ
constexpr std::int64_t kBallotRetryTime = kSecond / 10;

}  // namespace

Agreements::Agreements(Group& group, const Rules& rules)
    : group_(group), rules_(rules), lost_(group.size()), dead_(group.size()) {}

Agreements::Entry& Agreements::at(std::uint64_t number) {
  const Settings settings{group_.rank(), group_.size(), rules_.vote_timeout, kLossSettleTime,
                          kBallotRetryTime};
  auto [found, made] = agreements_.try_emplace(number, Entry{Agreement(settings)});
  if (made)
    for (int rank : lost_.list()) found->second.agreement.lose(rank, dead_.has(rank), now_ns());
  return found->second;
}

// An evicted process sends nothing: some peers may know of its eviction already, others not yet.
void Agreements::send(std::uint64_t number, Agreement& agreement) {
  if (group_.context().evicted()) {
    agreement.take_messages();
    return;
  }
  for (const Broadcast& broadcast : agreement.take_messages()) {
    FrameHeader header = group_.frame(FrameType::kAgree);
    header.channel = number;
    const std::string bytes = encode(*broadcast.message, group_.size());
    for (int rank : broadcast.to) group_.send_to(rank, header, bytes);
  }
}

std::optional<std::uint64_t> Agreements::begin(Vote vote, std::int64_t timeout) {
  std::uint64_t number;
  {
    std::lock_guard lock(mutex_);
    number = next_number_;
    while (!agreements_.empty() && agreements_.begin()->first + kKept <= number) {
      if (!agreements_.begin()->second.fetched) return std::nullopt;
      agreements_.erase(agreements_.begin());
    }
    ++next_number_;
    const std::int64_t now = now_ns();
    Agreement& agreement = at(number).agreement;
    agreement.vote(std::move(vote), now + std::min(timeout, INT64_MAX - now), now);
    send(number, agreement);
  }
  group_.context().bell().wake();  // threads that sleep until the next deadline must compute it again
  return number;
}

Agreements::Status Agreements::wait(std::uint64_t number, std::int64_t until) {
  auto news = [&] {
    std::lock_guard lock(mutex_);
    Entry& entry = agreements_.at(number);
    Status result{entry.agreement.outcome(), {}, entry.agreement.take_request()};
    if (result.outcome != Outcome::kOpen) {
      result.decision = entry.agreement.decision();
      entry.fetched = true;
    } else if (group_.context().evicted()) {
      entry.fetched = true;
      return Status{Outcome::kLeftOut, {}, {}};
    } else if (closed_) {
      result.outcome = Outcome::kClosed;
    }
    return result;
  };
  auto any = [](const Status& it) { return it.outcome != Outcome::kOpen || it.request; };
  struct Attention {
    std::atomic<int>& waiting;
    explicit Attention(std::atomic<int>& w) : waiting(w) { waiting.fetch_add(1, std::memory_order_seq_cst); }
    ~Attention() { waiting.fetch_sub(1, std::memory_order_relaxed); }
  } attention(waiting_);
  for (;;) {
    Status now = news();
    if (any(now) || now_ns() >= until) return now;
    Doorbell::Sleeper sleeper(group_.context().bell(), Wake::Any);
    if (now = news(); any(now)) return now;
    group_.context().wake_monitor();
    sleeper.sleep(std::min(until - now_ns(), 20 * kMillisecond));
  }
}

void Agreements::answer(std::uint64_t number, const WitnessAnswer& answer) {
  {
    std::lock_guard lock(mutex_);
    auto found = agreements_.find(number);
    if (closed_ || found == agreements_.end()) return;
    found->second.agreement.answer(answer, now_ns());
    send(number, found->second.agreement);
  }
  group_.context().bell().wake();
}

std::pair<RankSet, RankSet> Agreements::losses() {
  std::lock_guard lock(mutex_);
  return {lost_, dead_};
}

const char* Agreements::on_frame(int rank, const FrameHeader& header, const std::string& text) {
  Message message;
  if (const char* flaw = decode(text, {group_.size(), group_.rank(), rank}, message)) return flaw;
  if (group_.context().peers().is_evicted(group_.global(rank))) {  // the watch thread will detect it too
    lose(rank, false);
    return nullptr;
  }
  {
    std::lock_guard lock(mutex_);
    // Members that went on without this one may be far ahead of it; forgotten agreements have ended.
    if (closed_ || header.channel >= next_number_ + kKept || header.channel + kKept < next_number_)
      return nullptr;
    Agreement& agreement = at(header.channel).agreement;
    agreement.receive(rank, message, now_ns());
    send(header.channel, agreement);
  }
  group_.context().bell().wake();
  return nullptr;
}

void Agreements::lose(int rank, bool dead) {
  {
    std::lock_guard lock(mutex_);
    dead |= rules_.losses_are_deaths;
    lost_.add(rank);
    if (dead) dead_.add(rank);
    if (closed_) return;
    for (auto& [number, entry] : agreements_) {
      entry.agreement.lose(rank, dead, now_ns());
      send(number, entry.agreement);
    }
  }
  group_.context().bell().wake();
}

// If the member was lost before, its last messages may be missing: then its death is not certain.
void Agreements::leave(int rank) {
  {
    std::lock_guard lock(mutex_);
    if (lost_.has(rank)) return;
  }
  lose(rank, true);
}

void Agreements::check(std::int64_t now, std::int64_t& next) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  for (auto& [number, entry] : agreements_) {
    if (entry.agreement.next_tick() <= now) {
      entry.agreement.tick(now);
      send(number, entry.agreement);
    }
    next = std::min(next, entry.agreement.next_tick());
  }
}

void Agreements::close() {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    for (auto& [number, entry] : agreements_) {
      entry.agreement.inform_all();
      send(number, entry.agreement);
    }
  }
  group_.context().bell().wake();
}

}  // namespace shoal
