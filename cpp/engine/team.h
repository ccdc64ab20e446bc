// The members of a group on this host, and the memory they share for its collectives.
//
// Every member publishes what it does in a block of its own arena and reads the blocks of the others: each
// word has one writer.  A block has, for each lane, a few counters that only grow, and two slots used in
// turn.  A slot holds the call's fingerprint, what its owner exposes, and small data itself.
//
// A phase is one use of a slot: operation of a lane that stays on the host takes one phase, a hierarchical
// one several. A member may overwrite the slot of phase s-2 once all others have published phase s-1.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/operation.h"
#include "memory/arena.h"
#include "memory/doorbell.h"

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
  // then PartEntry[size of the whole group], then kInline bytes
};

struct alignas(64) Counters {
  std::atomic<std::uint64_t> staged{0};   // windows of my data that have been in my staging buffer
  std::atomic<std::uint64_t> reduced{0};  // windows whose slice I have reduced
  // windows of the others that I no longer need; a phase ends by saying so of the next
  std::atomic<std::uint64_t> taken{1ULL << kPhaseShift};
  std::atomic<std::uint64_t> staging{0};  // offset of my staging buffer, 0 while there is none
};

// One member's side of one lane.
struct Seat {
  Counters* counters = nullptr;
  std::byte* slots[2] = {};
  const Mapping* memory = nullptr;
  Doorbell* bell = nullptr;

  Slot& slot(std::uint64_t phase) const { return *reinterpret_cast<Slot*>(slots[phase & 1]); }
  PartEntry* table(std::uint64_t phase) const {
    return reinterpret_cast<PartEntry*>(slots[phase & 1] + sizeof(Slot));
  }
};

struct TeamLane {
  std::vector<Seat> seats;  // in team order
  std::uint64_t phase = 0;  // the last one begun
  std::unique_ptr<Block> staging;
};

class Team {
 public:
  // members: group ranks on this host in ascending order; `self` is the place of this process among them.
  Team(Context& context, std::uint64_t group, std::vector<int> members, const std::vector<int>& global_ranks,
       int self, int lanes);
  ~Team();

  int size() const { return static_cast<int>(members_.size()); }
  int self() const { return self_; }
  const std::vector<int>& members() const { return members_; }
  TeamLane& lane(int index) { return lanes_[static_cast<std::size_t>(index)]; }
  // Finds the blocks of members that have made theirs by now; true when all are found, or one is where none
  // can be (then `stray` says whose).
  bool resolve();
  std::optional<int> stray() const;  // a rank of the group
  std::byte* inline_data(const Seat& seat, std::uint64_t phase) const {
    return seat.slots[phase & 1] + sizeof(Slot) + most_parts_ * sizeof(PartEntry);
  }
  // The staging buffer of this member's lane, made at first use.
  std::byte* staging(TeamLane& lane);
  void ring_all(const TeamLane& lane) const;
  // Stray writers and readers may still be about: this memory is reused when they are gone.
  void quarantine();

 private:
  std::size_t slot_bytes() const;
  std::size_t block_bytes() const;
  void seat_at(int place, std::byte* block, const Mapping& memory, Doorbell& bell);

  Context& context_;
  std::uint64_t group_;
  std::vector<int> members_;
  std::vector<int> global_;
  std::size_t most_parts_;  // a member may expose a part for every rank of the group
  int self_;
  std::vector<TeamLane> lanes_;
  std::vector<bool> found_;
  std::mutex resolve_mutex_;
  std::atomic<bool> all_found_{false};
  std::atomic<int> stray_{-1};
  std::mutex staging_mutex_;
  bool quarantined_ = false;
  std::unique_ptr<Block> block_;
  DirectoryEntry* entry_ = nullptr;
};

}  // namespace shoal
