// One phase of a team: the data that this member exposes to the others on its host, and access to theirs.
#pragma once

#include <vector>

#include "collectives/collectives.h"
#include "engine/group.h"
#include "engine/host_members.h"

namespace shoal::collectives {

constexpr std::uint64_t kWindow = kStaging / 2;  // an exchange uses the staging buffer as two windows

class Phase {
 public:
  explicit Phase(Operation& op);

  int self() const { return team_.self(); }
  int size() const { return team_.size(); }

  // Publishes this member's parts: inline if they are small, in place if they are in shared memory, otherwise
  // staged in windows.
  Task open(std::vector<Span> parts);
  // Waits until a member (or all) has published, and compares its call.
  Task meet(int place);
  Task meet_all();
  // Waits until a counter of every other member has reached `window` windows of this phase.
  auto all(std::atomic<std::uint64_t> Counters::* counter, std::uint64_t windows) {
    return op_.until([this, counter, windows, place = 0]() mutable {
      for (; place < size(); ++place)
        if (place != self() && reached(place, counter) < target(windows)) return blocked_by(place);
      return true;
    });
  }
  // Waits until all have read the staging buffer's data of earlier phases.
  auto vacated() { return all(&Counters::taken, 0); }
  // Advances a counter and wakes the others.
  void advance(std::atomic<std::uint64_t> Counters::* counter, std::uint64_t windows);
  // Ends the phase for this member; close() also waits until the others need nothing more from it.
  void leave();
  Task close();

  const Slot& slot(int place) const { return seat(place).slot(number_); }
  bool direct(int place) const { return slot(place).exposure == Exposure::kDirect; }
  bool stages(int place) const { return slot(place).exposure == Exposure::kStaged; }
  bool all_direct() const;
  Exposure exposure() const { return exposure_; }
  const PartEntry& entry(int place, std::uint32_t part) const { return seat(place).table(number_)[part]; }
  // Address of `bytes` of a part that is not staged, from byte `skip` on; address in a member's staging
  // buffer.  Throw InvalidPeerData if it is outside of the member's memory.
  std::byte* part(int place, std::uint32_t part, std::uint64_t bytes, std::uint64_t skip = 0) const;
  std::byte* staging(int place, std::uint64_t at, std::uint64_t bytes) const;
  std::byte* my_staging() { return team_.staging(lane_); }
  // Only this member reads its part `part`, so it is not staged.
  void keep(std::uint32_t part) { kept_[part] = true; }
  // Copies window `window` of this member's parts to its staging buffer.
  Task stage(std::uint64_t window);
  Task staged(int place, std::uint64_t windows);
  std::uint64_t step_bytes(int place) const;  // bytes of each part in a window
  std::uint64_t windows(int place) const;     // number of windows of a member that stages
  std::uint64_t windows() const { return windows_; }
  std::uint64_t reached(int place, std::atomic<std::uint64_t> Counters::* counter) const {
    return (seat(place).counters->*counter).load(std::memory_order_acquire);
  }
  std::uint64_t target(std::uint64_t windows) const { return (number_ << kPhaseShift) + windows; }
  Operation& op() const { return op_; }

 private:
  const MemberLane& seat(int place) const { return lane_.member_lanes[place]; }
  // False: a condition is not met because of this member.
  bool blocked_by(int place) {
    op_.set_blocker(team_.members()[place]);
    return false;
  }
  bool is_published(int place) {
    const Slot& theirs = slot(place);
    if (theirs.phase.load(std::memory_order_acquire) < number_) return blocked_by(place);
    const int late = theirs.late;
    if (late < op_.group().size()) op_.pass_blocker(team_.members()[place], late);
    return true;
  }
  std::byte* reach(int place, std::uint64_t offset, std::uint64_t skip, std::uint64_t bytes) const;
  [[noreturn]] void refuse(int place) const;

  Operation& op_;
  HostMembers& team_;
  HostLane& lane_;
  std::uint64_t number_;
  std::vector<Span> parts_;
  std::vector<bool> kept_;
  std::uint64_t windows_ = 0;
  Exposure exposure_{};
};

// exchange.cc: members read each other's parts.
struct Pull {
  int place;
  std::uint32_t part;
  Span to;
};
// kept: index of a part that only this member pulls, or -1.
Task exchange(Operation& op, std::vector<Span> parts, std::vector<Pull> pulls, int kept = -1);
Task shared_broadcast(Operation& op, Span data, int root);

// Each member reduces some parts, no two members the same; `partial`: results stay in the accumulator's type.
struct Reduce {
  std::uint32_t part;
  std::byte* to;
};
Task reduce_parts(Operation& op, std::vector<Span> parts, std::vector<Reduce> reduces, bool partial);
Task meet(Operation& op);  // a barrier

// all_reduce.cc: root < 0 for an all-reduce, otherwise the place of the root.
Task shared_all_reduce(Operation& op, Span data, int root);

}  // namespace shoal::collectives
