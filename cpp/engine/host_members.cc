#include "engine/host_members.h"

#include <new>

#include "engine/context.h"

namespace shoal {
namespace {

constexpr std::uint64_t kFree = 0, kClaimed = 1, kGone = ~0ULL;

std::size_t place(std::uint64_t group, std::size_t probe) {
  return static_cast<std::size_t>((group ^ (group >> 29)) + probe) % kDirectorySize;
}

DirectoryEntry* enter(ArenaHeader& header, std::uint64_t group, std::uint64_t offset) {
  for (std::size_t probe = 0; probe < kDirectorySize; ++probe) {
    DirectoryEntry& entry = header.directory[place(group, probe)];
    std::uint64_t seen = entry.group.load(std::memory_order_relaxed);
    if (seen != kFree && seen != kGone) continue;
    if (!entry.group.compare_exchange_strong(seen, kClaimed)) continue;
    entry.offset.store(offset, std::memory_order_relaxed);
    entry.group.store(group, std::memory_order_release);
    return &entry;
  }
  throw OutOfMemory("more than " + std::to_string(kDirectorySize) + " groups are open in one process");
}

std::uint64_t look_up(const ArenaHeader& header, std::uint64_t group) {
  for (std::size_t probe = 0; probe < kDirectorySize; ++probe) {
    const DirectoryEntry& entry = header.directory[place(group, probe)];
    std::uint64_t seen = entry.group.load(std::memory_order_acquire);
    if (seen == group) return entry.offset.load(std::memory_order_relaxed);
    if (seen == kFree) return 0;
  }
  return 0;
}

}  // namespace

HostMembers::HostMembers(Context& context, std::uint64_t group, std::vector<int> members,
                         const std::vector<int>& global_ranks, int self, int lanes)
    : context_(context),
      group_(group),
      members_(std::move(members)),
      most_parts_(global_ranks.size()),
      self_(self),
      lanes_(lanes) {
  for (int member : members_) global_.push_back(global_ranks[member]);
  found_.assign(members_.size(), false);
  for (HostLane& lane : lanes_) lane.member_lanes.resize(members_.size());
  block_ = std::make_unique<Block>(context_.arena(), block_bytes());
  map_member(self_, block_->data(), context_.arena()->mapping(), context_.bell());
  for (const HostLane& lane : lanes_) {
    new (lane.member_lanes[self_].counters) Counters;
    for (std::byte* slot : lane.member_lanes[self_].slots) new (slot) Slot;
  }
  entry_ = enter(context_.header(), group_, block_->offset());
}

HostMembers::~HostMembers() {
  // After an orderly end, the others may still look up this member's last data: nothing is reused then.
  if (!context_.forked() && !context_.closed()) entry_->group.store(kGone, std::memory_order_release);
}

std::size_t HostMembers::slot_bytes() const {
  std::size_t bytes = sizeof(Slot) + most_parts_ * sizeof(PartEntry) + kInline;
  return (bytes + 63) / 64 * 64;
}

std::size_t HostMembers::block_bytes() const { return lanes_.size() * (sizeof(Counters) + 2 * slot_bytes()); }

std::optional<int> HostMembers::invalid_member() const {
  const int place = invalid_member_.load(std::memory_order_acquire);
  return place < 0 ? std::nullopt : std::optional(members_[place]);
}

void HostMembers::map_member(int place, std::byte* block, const Mapping& memory, Doorbell& bell) {
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    std::byte* at = block + i * (sizeof(Counters) + 2 * slot_bytes());
    MemberLane& seat = lanes_[i].member_lanes[place];
    seat.counters = reinterpret_cast<Counters*>(at);
    seat.slots[0] = at + sizeof(Counters);
    seat.slots[1] = seat.slots[0] + slot_bytes();
    seat.memory = &memory;
    seat.bell = &bell;
  }
  found_[place] = true;
}

std::optional<int> HostMembers::missing() {
  if (all_found_.load(std::memory_order_acquire)) return std::nullopt;
  std::lock_guard lock(resolve_mutex_);
  std::optional<int> missing;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (found_[i]) continue;
    const Mapping& memory = context_.memory(global_[i]);
    auto& header = *memory.at<ArenaHeader>(0);
    std::uint64_t offset = look_up(header, group_);
    if (offset != 0 && (offset % alignof(Counters) != 0 || !memory.holds(offset, block_bytes()))) {
      invalid_member_.store(static_cast<int>(i), std::memory_order_release);
      return std::nullopt;
    }
    if (offset != 0)
      map_member(static_cast<int>(i), memory.base() + offset, memory, header.doorbell);
    else
      missing = static_cast<int>(i);
  }
  all_found_.store(!missing, std::memory_order_release);
  return missing;
}

std::byte* HostMembers::staging(HostLane& lane) {
  if (!lane.staging) {
    auto block = std::make_unique<Block>(context_.arena(), kStaging);
    std::lock_guard lock(staging_mutex_);
    if (quarantined_) context_.quarantine().hold(group_, block->data());
    lane.staging = std::move(block);
    lane.member_lanes[self_].counters->staging.store(lane.staging->offset(), std::memory_order_release);
  }
  return lane.staging->data();
}

void HostMembers::ring_all(const HostLane& lane) const {
  for (std::size_t i = 0; i < lane.member_lanes.size(); ++i)
    if (static_cast<int>(i) != self_ && lane.member_lanes[i].bell != nullptr)
      lane.member_lanes[i].bell->ring();
}

void HostMembers::quarantine() {
  context_.quarantine().hold(group_, block_->data());
  std::lock_guard lock(staging_mutex_);
  quarantined_ = true;
  for (HostLane& lane : lanes_)
    if (lane.staging) context_.quarantine().hold(group_, lane.staging->data());
}

}  // namespace shoal
