// A queue of the tickets that are due, for one waiting thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "common/clock.h"

namespace shoal {

class Tickets {
 public:
  void add(std::int64_t ticket) {
    std::lock_guard lock(mutex_);
    due_.push_back(ticket);
    if (asleep_) ready_.notify_one();
  }

  // Makes `wait` return even if nothing is due.
  void nudge() {
    std::lock_guard lock(mutex_);
    nudged_ = true;
    if (asleep_) ready_.notify_one();
  }

  void close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    ready_.notify_all();
  }

  // Waits until tickets are due, at most until `until` (ns); false if closed and all tickets were returned.
  bool wait(std::int64_t until, std::vector<std::int64_t>& due) {
    std::unique_lock lock(mutex_);
    while (due_.empty() && !closed_ && !nudged_) {
      const std::int64_t left = until - now_ns();
      if (left <= 0) break;
      asleep_ = true;
      ready_.wait_for(lock, std::chrono::nanoseconds(left));
      asleep_ = false;
    }
    nudged_ = false;
    due = std::exchange(due_, {});
    return !due.empty() || !closed_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable ready_;
  std::vector<std::int64_t> due_;
  bool asleep_ = false, nudged_ = false, closed_ = false;
};

}  // namespace shoal
