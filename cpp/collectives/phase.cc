#include "collectives/phase.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "engine/context.h"

namespace shoal::collectives {

Phase::Phase(Operation& op)
    : op_(op), team_(*op.group().team()), lane_(team_.lane(op.request().channel)), number_(++lane_.phase) {}

Task Phase::open(std::vector<Span> parts) {
  parts_ = std::move(parts);
  kept_.resize(parts_.size());
  auto found = op_.until_called([this] {
    const std::optional<int> missing = team_.missing();
    return !missing || blocked_by(*missing);
  });
  co_await found;
  if (auto invalid_member = team_.invalid_member())
    throw InvalidPeerData(*invalid_member,
                          "says that its part of the group lies outside of its shared memory");
  // The slot was last used two phases ago; a member that has begun the previous phase no longer reads it.
  int place = 0;
  auto free = op_.until_called([this, place]() mutable {
    for (; place < size(); ++place)
      if (seat(place).slot(number_ - 1).phase.load(std::memory_order_acquire) < number_ - 1)
        return blocked_by(place);
    return true;
  });
  co_await free;
  Slot& mine = lane_.member_lanes[self()].slot(number_);
  PartEntry* table = seat(self()).table(number_);
  Arena& arena = *op_.group().context().arena();
  std::uint64_t total = 0, longest = 0;
  bool shared = true;
  for (const Span& part : parts_) {
    total += part.bytes;
    longest = std::max(longest, part.bytes);
    shared &= part.bytes == 0 || arena.contains(part.data, part.bytes);
  }
  mine.call = op_.call();
  mine.parts = static_cast<std::uint32_t>(parts_.size());
  exposure_ = total <= kInline ? Exposure::kInline : shared ? Exposure::kDirect : Exposure::kStaged;
  mine.exposure = exposure_;
  std::byte* data = team_.inline_data(seat(self()), number_);
  std::uint64_t offset = 0;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const Span& part = parts_[i];
    table[i].bytes = part.bytes;
    if (exposure_ == Exposure::kInline) {
      table[i].offset = offset;
      if (part.bytes > 0) std::memcpy(data + offset, part.data, part.bytes);
      offset += part.bytes;
    } else if (exposure_ == Exposure::kDirect && part.bytes > 0) {
      table[i].offset = arena.offset_of(part.data);
    }
  }
  const std::uint64_t step = step_bytes(self());
  windows_ = exposure_ == Exposure::kStaged ? (longest + step - 1) / step : 0;
  mine.windows = windows_;
  mine.late = op_.last_to_call();
  mine.phase.store(number_, std::memory_order_release);
  team_.ring_all(lane_);
  co_await op_.begun();
}

Task Phase::meet(int place) {
  auto published = op_.until_called([this, place] { return is_published(place); });
  co_await published;
  if (!(slot(place).call == op_.call())) {
    Task mismatch = op_.mismatch();
    co_await mismatch;
  }
}

Task Phase::meet_all() {
  int place = 0;
  auto published = op_.until_called([this, place]() mutable {
    for (; place < size(); ++place)
      if (!is_published(place)) return false;
    return true;
  });
  co_await published;
  for (int i = 0; i < size(); ++i) {
    if (slot(i).call == op_.call()) continue;
    Task mismatch = op_.mismatch();
    co_await mismatch;
  }
}

void Phase::advance(std::atomic<std::uint64_t> Counters::* counter, std::uint64_t windows) {
  (seat(self()).counters->*counter).store(target(windows), std::memory_order_release);
  team_.ring_all(lane_);
}

void Phase::leave() {
  seat(self()).counters->taken.store((number_ + 1) << kPhaseShift, std::memory_order_release);
  team_.ring_all(lane_);
}

Task Phase::close() {
  leave();
  if (exposure() == Exposure::kInline) co_return;
  co_await all(&Counters::taken, 1ULL << kPhaseShift);
}

bool Phase::all_direct() const {
  for (int place = 0; place < size(); ++place)
    if (!direct(place)) return false;
  return true;
}

void Phase::refuse(int place) const {
  throw InvalidPeerData(team_.members()[place], "exposes what lies outside of its shared memory");
}

// Other members can write to a member's memory: a value read there may not be its owner's, and may change.
std::byte* Phase::reach(int place, std::uint64_t offset, std::uint64_t skip, std::uint64_t bytes) const {
  const Mapping& memory = *seat(place).memory;
  if (!memory.holds(offset, skip) || !memory.holds(offset + skip, bytes)) refuse(place);
  return memory.base() + offset + skip;
}

std::byte* Phase::part(int place, std::uint32_t part, std::uint64_t bytes, std::uint64_t skip) const {
  const std::uint64_t offset = __atomic_load_n(&entry(place, part).offset, __ATOMIC_RELAXED);
  const std::uint64_t end = skip + bytes;
  // Elements are read in place; torch aligns them to their size, complex ones to half of it.
  if (end > 0 && offset % std::min<std::size_t>(itemsize(op_.request().reduction.dtype), 8) != 0)
    refuse(place);
  if (slot(place).exposure != Exposure::kInline) return reach(place, end == 0 ? 0 : offset, skip, bytes);
  if (offset > kInline || end > kInline - offset) refuse(place);
  return team_.inline_data(seat(place), number_) + offset + skip;
}

std::byte* Phase::staging(int place, std::uint64_t at, std::uint64_t bytes) const {
  const std::uint64_t offset = seat(place).counters->staging.load(std::memory_order_acquire);
  if (offset % 64 != 0) refuse(place);
  return reach(place, offset, at, bytes);
}

std::uint64_t Phase::step_bytes(int place) const {
  const std::uint64_t parts = place == self() ? parts_.size() : slot(place).parts;
  return kWindow / std::max<std::uint64_t>(parts, 1) / 64 * 64;
}

std::uint64_t Phase::windows(int place) const {
  const std::uint64_t windows = slot(place).windows;
  if (windows >> kPhaseShift) refuse(place);  // more than the counters can count
  return windows;
}

Task Phase::stage(std::uint64_t window) {
  if (window < 2) {
    co_await vacated();
  }
  std::byte* buffer = my_staging() + (window & 1) * kWindow;
  std::uint64_t step = step_bytes(self());
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    std::uint64_t offset = window * step;
    if (kept_[i] || offset >= parts_[i].bytes) continue;
    kernels::copy(buffer + i * step, parts_[i].data + offset, std::min(step, parts_[i].bytes - offset));
  }
  advance(&Counters::staged, window + 1);
}

Task Phase::staged(int place, std::uint64_t windows) {
  auto ready = op_.until([this, place, windows] {
    return reached(place, &Counters::staged) >= target(windows) || blocked_by(place);
  });
  co_await ready;
}

}  // namespace shoal::collectives
