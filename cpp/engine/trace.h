// The times of operations while a trace is on; for shoal.trace.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "net/frame.h"

namespace shoal {

// One operation that has ended.  Times are in nanoseconds of CLOCK_MONOTONIC.
struct TraceEvent {
  std::uint64_t group = 0;     // its ident
  std::uint64_t channel = 0;   // the number or key of a collective, see Request
  std::int64_t submitted = 0;  // when the program called it
  std::int64_t begun = 0;      // when its turn in its lane came; 0: never
  std::int64_t waited = 0;     // when its first wait for members began; 0: it waited for none
  std::int64_t called = 0;     // when its last one ended
  std::int64_t ended = 0;
  std::uint64_t bytes = 0;
  std::int32_t last = -1;  // the member that it waited for last; -1: none, or unknown
  std::int32_t peer = -1;  // of a message
  Kind kind{};
  bool failed = false;
  bool keyed = false;
  std::uint8_t unused[5] = {};
};
// Python reads arrays of them, see src/shoal/tracing/spool.py.
static_assert(sizeof(TraceEvent) == 80 && std::is_trivially_copyable_v<TraceEvent>);

class Trace {
 public:
  static constexpr std::size_t kMaxEvents = 1 << 16;  // that are kept until they are taken

  bool on() const { return on_.load(std::memory_order_relaxed); }
  void turn(bool on) { on_.store(on, std::memory_order_relaxed); }
  void add(const TraceEvent& event) {
    std::lock_guard lock(mutex_);
    if (events_.size() < kMaxEvents)
      events_.push_back(event);
    else
      ++dropped_;
  }
  // The events since the last call, and the number of those for which there was no room.
  std::pair<std::vector<TraceEvent>, std::uint64_t> take() {
    std::lock_guard lock(mutex_);
    return {std::exchange(events_, {}), std::exchange(dropped_, 0)};
  }

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<TraceEvent> events_;
  std::uint64_t dropped_ = 0;
};

}  // namespace shoal
