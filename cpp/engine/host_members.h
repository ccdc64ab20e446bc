// The members of a group on this host, and the memory they share for its collectives.
//
// Every member publishes its state in a block of its own arena and reads the blocks of the others: each word
// has one writer.  For each lane, a block has a few counters that only grow, and two slots that are used
// alternately.  A slot contains the call's fingerprint, a description of the exposed data, and small data.
//
// A phase is one use of a slot.  An operation on one host takes one phase, a hierarchical one several.  A
// member may overwrite the slot of phase s-2 when all others have published phase s-1.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/operation.h"
#include "shm/arena.h"
#include "shm/doorbell.h"

namespace shoal {

class Context;

constexpr std::size_t kInline = 4096;      // bytes of data in a slot
constexpr std::size_t kStaging = 1 << 20;  // bytes of a lane's staging buffer
constexpr int kPhaseShift = 24;            // a counter is phase << kPhaseShift | window

enum class Exposure : std::uint32_t { kInline, kDirect, kStaged };

struct PartEntry {
  std::uint64_t offset = 0;  // in the owner's arena (direct), or in the slot's data (inline)
  std::uint64_t bytes = 0;
};

struct Slot {
  std::atomic<std::uint64_t> phase{0};
  Fingerprint call;
  Exposure exposure{};
  std::uint32_t parts = 0;
  std::uint64_t windows = 0;
  std::int32_t late = -1;  // the member (group rank) for which this one had to wait; -1: none
  // followed by PartEntry[size of the whole group] and kInline bytes
};

struct alignas(64) Counters {
  std::atomic<std::uint64_t> staged{0};   // windows of this member's data that have been in its buffer
  std::atomic<std::uint64_t> reduced{0};  // windows whose slice this member has reduced
  // Windows of the others that this member no longer needs; at the end of a phase, set for the next phase.
  std::atomic<std::uint64_t> taken{1ULL << kPhaseShift};
  std::atomic<std::uint64_t> staging{0};  // offset of the staging buffer; 0: none
};

// One member's side of one lane.
struct MemberLane {
  Counters* counters = nullptr;
  std::byte* slots[2] = {};
  const Mapping* memory = nullptr;
  Doorbell* bell = nullptr;

  Slot& slot(std::uint64_t phase) const { return *reinterpret_cast<Slot*>(slots[phase & 1]); }
  PartEntry* table(std::uint64_t phase) const {
    return reinterpret_cast<PartEntry*>(slots[phase & 1] + sizeof(Slot));
  }
};

struct HostLane {
  std::vector<MemberLane> member_lanes;  // in team order
  std::uint64_t phase = 0;               // the last phase begun
  std::unique_ptr<Block> staging;
};

class HostMembers {
 public:
  // members: group ranks on this host, ascending; self: index of this process among them.
  HostMembers(Context& context, std::uint64_t group, std::vector<int> members,
              const std::vector<int>& global_ranks, int self, int lanes);
  ~HostMembers();

  int size() const { return static_cast<int>(members_.size()); }
  int self() const { return self_; }
  const std::vector<int>& members() const { return members_; }
  HostLane& lane(std::uint64_t channel) { return lanes_[channel % lanes_.size()]; }
  // Looks up the members' blocks.  Returns a member that has none yet (an index); none if all are found, or
  // if one has an invalid address (see `invalid_member`).
  std::optional<int> missing();
  std::optional<int> invalid_member() const;  // group rank of the member with an invalid block
  std::byte* inline_data(const MemberLane& seat, std::uint64_t phase) const {
    return seat.slots[phase & 1] + sizeof(Slot) + most_parts_ * sizeof(PartEntry);
  }
  // The staging buffer of this member's lane, allocated at first use.
  std::byte* staging(HostLane& lane);
  void ring_all(const HostLane& lane) const;
  // Delays the reuse of this memory until members that may still access it have left.
  void quarantine();

 private:
  std::size_t slot_bytes() const;
  std::size_t block_bytes() const;
  void map_member(int place, std::byte* block, const Mapping& memory, Doorbell& bell);

  Context& context_;
  std::uint64_t group_;
  std::vector<int> members_;
  std::vector<int> global_;
  std::size_t most_parts_;  // a member may expose a part for every rank of the group
  int self_;
  std::vector<HostLane> lanes_;
  std::vector<bool> found_;
  std::mutex resolve_mutex_;
  std::atomic<bool> all_found_{false};
  std::atomic<int> invalid_member_{-1};
  std::mutex staging_mutex_;
  bool quarantined_ = false;
  std::unique_ptr<Block> block_;
  DirectoryEntry* entry_ = nullptr;
};

}  // namespace shoal
