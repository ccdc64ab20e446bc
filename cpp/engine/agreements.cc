#include "engine/agreements.h"

#include <algorithm>

#include "base/clock.h"
#include "engine/context.h"
#include "engine/group.h"

namespace shoal {
namespace {

using namespace agreement;

constexpr std::int64_t kVoteTimeout = 10 * kSecond;
constexpr std::int64_t kSettle = kSecond;  // beyond which losses are rarely told apart
constexpr std::int64_t kRetry = kSecond / 10;

}  // namespace

Agreements::Agreements(Group& group) : group_(group), lost_(group.size()), dead_(group.size()) {}

Agreement& Agreements::at(std::uint64_t number) {
  auto [found, made] =
      agreements_.try_emplace(number, Settings{group_.rank(), group_.size(), kVoteTimeout, kSettle, kRetry});
  if (made)
    for (int rank : lost_.list()) found->second.lose(rank, dead_.has(rank), now_ns());
  return found->second;
}

void Agreements::send(std::uint64_t number, Agreement& agreement) {
  for (const Broadcast& broadcast : agreement.take_messages()) {
    FrameHeader header = group_.frame(FrameType::kAgree);
    header.channel = number;
    const std::string bytes = encode(*broadcast.message, group_.size());
    for (int rank : broadcast.to) group_.tell(rank, header, bytes);
  }
}

std::uint64_t Agreements::begin(Vote vote, std::int64_t timeout) {
  std::uint64_t number;
  {
    std::lock_guard lock(mutex_);
    number = next_number_++;
    const std::int64_t now = now_ns();
    at(number).vote(std::move(vote), now + timeout, now);
    send(number, at(number));
    while (!agreements_.empty() && agreements_.begin()->first + kKept <= number)
      agreements_.erase(agreements_.begin());
  }
  group_.context().bell().wake();  // whoever looks at the time has another time to look
  return number;
}

Outcome Agreements::wait(std::uint64_t number, std::int64_t until) {
  auto outcome = [&] {
    std::lock_guard lock(mutex_);
    return at(number).outcome();
  };
  for (;;) {
    Outcome now = outcome();
    if (now != Outcome::kOpen || now_ns() >= until) return now;
    Doorbell::Sleeper sleeper(group_.context().bell(), Wake::Any);
    if (now = outcome(); now != Outcome::kOpen) return now;
    sleeper.sleep(std::min(until - now_ns(), 20 * kMillisecond));
  }
}

std::optional<Decision> Agreements::decision(std::uint64_t number) {
  std::lock_guard lock(mutex_);
  return at(number).decision();
}

const char* Agreements::on_frame(int rank, const FrameHeader& header, const std::string& text) {
  Message message;
  if (const char* flaw = decode(text, {group_.size(), group_.rank(), rank}, message)) return flaw;
  {
    std::lock_guard lock(mutex_);
    if (header.channel >= next_number_ + kKept) return "an agreement far ahead of all others";
    if (header.channel + kKept < next_number_) return nullptr;  // forgotten
    Agreement& agreement = at(header.channel);
    agreement.receive(rank, message, now_ns());
    send(header.channel, agreement);
  }
  group_.context().bell().wake();
  return nullptr;
}

void Agreements::lose(int rank, bool dead) {
  {
    std::lock_guard lock(mutex_);
    lost_.add(rank);
    if (dead) dead_.add(rank);
    for (auto& [number, agreement] : agreements_) {
      agreement.lose(rank, dead, now_ns());
      send(number, agreement);
    }
  }
  group_.context().bell().wake();
}

void Agreements::check(std::int64_t now, std::int64_t& next) {
  std::lock_guard lock(mutex_);
  for (auto& [number, agreement] : agreements_) {
    if (agreement.next_tick() <= now) {
      agreement.tick(now);
      send(number, agreement);
    }
    next = std::min(next, agreement.next_tick());
  }
}

}  // namespace shoal
