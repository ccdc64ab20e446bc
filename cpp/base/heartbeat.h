// When a thread that listens to others sends its heartbeats, and for how long it has heard nothing of them.
//
// A thread that did not run itself cannot tell how long the others were silent: what they sent meanwhile may
// lie unread, and they may have been stopped together with it.  They get the whole time to speak anew.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "base/duration.h"

namespace shoal {

class Heartbeat {
 public:
  // limit: nanoseconds without a word from another until it is lost.
  explicit Heartbeat(std::int64_t limit) : limit_(limit) {}

  std::int64_t limit() const { return limit_; }
  std::int64_t period() const { return std::clamp(limit_ / 4, 10 * kMillisecond, kSecond); }
  void start(std::int64_t now) { last_round_ = listening_since_ = now; }

  // Each time that the thread has read what there was: whether heartbeats are due.
  bool due(std::int64_t now) {
    if (const std::int64_t gap = now - last_round_.exchange(now); gap >= limit_ / 2) {
      gap_.store(gap);
      listening_since_.store(now);
    }
    if (now < next()) return false;
    last_beat_ = now;
    return true;
  }
  std::int64_t next() const { return last_beat_ + period(); }

  // Why another, of which something was last heard at a time, counts as lost; empty: it does not.
  std::string silence(std::int64_t last_heard, std::int64_t now) const {
    const std::int64_t quiet = now - std::max(last_heard, listening_since_.load());
    if (quiet <= limit_) return {};
    return "nothing was heard from its host for " + seconds(quiet) +
           "; it is stopped or starved, or the network is cut";
  }

  // Any thread: for how long the one that listens did not run, if it was lately; otherwise 0.
  std::int64_t absence(std::int64_t now) const {
    const std::int64_t gap = now - last_round_.load();  // it may not have run again yet
    if (gap >= limit_ / 2) return gap;
    return now - listening_since_.load() < limit_ ? gap_.load() : 0;
  }

 private:
  const std::int64_t limit_;
  std::int64_t last_beat_ = 0;                    // the thread's own
  std::atomic<std::int64_t> last_round_{0};       // when it last ran
  std::atomic<std::int64_t> listening_since_{0};  // without a gap in its own rounds
  std::atomic<std::int64_t> gap_{0};              // how long the last one was
};

}  // namespace shoal
