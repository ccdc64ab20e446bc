// Heartbeat timing of a monitor thread: when to send heartbeats, and when a silent peer is lost.
//
// After a pause of its own, the thread cannot know how long its peers were silent: their frames may be
// unread, and the peers may have been stopped together with it.  Each peer then gets the whole limit again.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "common/clock.h"

namespace shoal {

class Heartbeat {
 public:
  // limit: nanoseconds of silence after which a peer is lost.
  explicit Heartbeat(std::int64_t limit) : limit_(limit) {}

  std::int64_t limit() const { return limit_; }
  std::int64_t period() const { return std::clamp(limit_ / 4, 10 * kMillisecond, kSecond); }
  void start(std::int64_t now) { last_round_ = listening_since_ = now; }

  // Called after each round of reading: returns whether heartbeats are due.
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

  // Returns why a peer last received from at `last_heard` is lost; empty if it is not lost.
  std::string silence(std::int64_t last_heard, std::int64_t now) const {
    const std::int64_t quiet = now - std::max(last_heard, listening_since_.load());
    if (quiet <= limit_) return {};
    return "no message came from its host for " + seconds(quiet) +
           "; it is stopped or starved, or the network is cut";
  }

  // Any thread: returns how long the monitor thread did not run, if that was recent; otherwise 0.
  std::int64_t absence(std::int64_t now) const {
    const std::int64_t gap = now - last_round_.load();  // it may not have run again yet
    if (gap >= limit_ / 2) return gap;
    return now - listening_since_.load() < limit_ ? gap_.load() : 0;
  }

 private:
  const std::int64_t limit_;
  std::int64_t last_beat_ = 0;                    // used by the monitor thread only
  std::atomic<std::int64_t> last_round_{0};       // when the thread last ran
  std::atomic<std::int64_t> listening_since_{0};  // start of the rounds without a gap
  std::atomic<std::int64_t> gap_{0};              // length of the last gap
};

}  // namespace shoal
