// One phase of a team: what this member exposes to the others on its host, and what it may read of theirs.
#pragma once

#include <vector>

#include "collectives/collectives.h"
#include "engine/group.h"
#include "engine/team.h"

namespace shoal::collectives {

constexpr std::uint64_t kWindow = kStaging / 2;  // an exchange uses the staging buffer as two of this size

class Phase {
 public:
  explicit Phase(Operation& op);

  Team& team() const { return team_; }
  int self() const { return team_.self(); }
  int size() const { return team_.size(); }

  // Publishes what this member exposes: inline if it is small, in place if it lies in shared memory, else to
  // be staged in windows of `window` bytes.
  Task open(std::vector<Span> parts, std::uint64_t window);
  // Waits until a member (or all) has published, and compares what it calls.
  Task meet(int place);
  Task meet_all();
  // Waits until a counter of every other member has reached `window` windows of this phase.
  auto all(std::atomic<std::uint64_t> Counters::* counter, std::uint64_t windows) {
    return op_.until([this, counter, windows, place = 0]() mutable {
      for (; place < size(); ++place)
        if (place != self() && reached(place, counter) < target(windows)) return false;
      return true;
    });
  }
  // Waits until all have read what earlier phases left in the staging buffer.
  auto vacated() { return all(&Counters::taken, 0); }
  // Tells the others.
  void advance(std::atomic<std::uint64_t> Counters::* counter, std::uint64_t windows);
  // Ends the phase: this member needs nothing more of the others; and, with close(), they nothing of it.
  void leave();
  Task close();

  const Slot& slot(int place) const { return seat(place).slot(number_); }
  bool direct(int place) const { return slot(place).exposure == Exposure::kDirect; }
  bool stages(int place) const { return slot(place).exposure == Exposure::kStaged; }
  bool all_direct() const;
  Exposure exposure() const { return exposure_; }
  const PartEntry& entry(int place, std::uint32_t part) const { return seat(place).table(number_)[part]; }
  // Where `bytes` of a part lie, `skip` bytes into it, if it need not be staged; and of the staging buffers.
  // Throws PeerFlaw where the member's memory does not reach.
  std::byte* part(int place, std::uint32_t part, std::uint64_t bytes, std::uint64_t skip = 0) const;
  std::byte* staging(int place, std::uint64_t at, std::uint64_t bytes) const;
  std::byte* my_staging() { return team_.staging(lane_); }
  // This member alone reads its part `part`, which therefore is not staged.
  void keep(std::uint32_t part) { kept_[part] = true; }
  // Puts window `window` of my parts into its staging buffer.
  Task stage(std::uint64_t window);
  Task staged(int place, std::uint64_t windows);
  std::uint64_t step_bytes(int place) const;  // bytes of each part in a window
  std::uint64_t windows(int place) const;     // of a member that stages its parts
  std::uint64_t windows() const { return windows_; }
  std::uint64_t reached(int place, std::atomic<std::uint64_t> Counters::* counter) const {
    return (seat(place).counters->*counter).load(std::memory_order_acquire);
  }
  std::uint64_t target(std::uint64_t windows) const { return (number_ << kPhaseShift) + windows; }
  Operation& op() const { return op_; }

 private:
  const Seat& seat(int place) const { return lane_.seats[static_cast<std::size_t>(place)]; }
  std::byte* reach(int place, std::uint64_t offset, std::uint64_t skip, std::uint64_t bytes) const;
  [[noreturn]] void refuse(int place) const;

  Operation& op_;
  Team& team_;
  TeamLane& lane_;
  std::uint64_t number_;
  std::vector<Span> parts_;
  std::vector<bool> kept_;
  std::uint64_t window_ = 0;
  std::uint64_t windows_ = 0;
  Exposure exposure_{};
};

// exchange.cc: members read parts of one another.
struct Pull {
  int place;
  std::uint32_t part;
  Span to;
};
// kept: the part, if any, that nobody but this member pulls.
Task exchange(Operation& op, std::vector<Span> parts, std::vector<Pull> pulls, int kept = -1);
Task shared_broadcast(Operation& op, Span data, int root);

// Each member reduces some parts over all members, no two the same; `partial`: results stay in the
// accumulator's type.
struct Reduce {
  std::uint32_t part;
  std::byte* to;
};
Task reduce_parts(Operation& op, std::vector<Span> parts, std::vector<Reduce> reduces, bool partial);
Task meet(Operation& op);  // a barrier

// all_reduce.cc: root < 0 for an all-reduce, else the place that gets the result.
Task shared_all_reduce(Operation& op, Span data, int root);

}  // namespace shoal::collectives
