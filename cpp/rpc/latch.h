// A latch that one thread waits for and another opens, once.  Opening costs a system call only if a thread
// sleeps.  The waiter polls for a moment before it sleeps, and yields the core meanwhile.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

#include "common/clock.h"

namespace shoal {

class Latch {
 public:
  bool is_open() const { return word_.load(std::memory_order_acquire) == kOpen; }

  // A thread that finds the latch open sees everything written before it was opened.
  void open() {
    if (word_.exchange(kOpen, std::memory_order_acq_rel) == kAwaited)
      futex(FUTEX_WAKE_PRIVATE, INT_MAX, nullptr);
  }

  // Blocks until the latch is open, until `deadline` (ns), or until a signal; returns whether it is open.
  bool wait(std::int64_t deadline) {
    for (const std::int64_t until = std::min(deadline, now_ns() + kSpinTime); now_ns() < until; sched_yield())
      if (is_open()) return true;
    std::uint32_t seen = kShut;
    if (!word_.compare_exchange_strong(seen, kAwaited, std::memory_order_acq_rel) && seen == kOpen)
      return true;
    const std::int64_t left = deadline - now_ns();
    if (left > 0) {
      timespec limit{static_cast<time_t>(left / kSecond), static_cast<long>(left % kSecond)};
      futex(FUTEX_WAIT_PRIVATE, kAwaited, &limit);
    }
    return is_open();
  }

 private:
  // Longer than a short call and its caller's work before the next; waking an idle core can take as long.
  static constexpr std::int64_t kSpinTime = 100'000;  // ns
  static constexpr std::uint32_t kShut = 0, kAwaited = 1, kOpen = 2;
  void futex(int what, std::uint32_t value, const timespec* limit) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word_), what, value, limit, nullptr, 0);
  }
  std::atomic<std::uint32_t> word_{kShut};
};

}  // namespace shoal
