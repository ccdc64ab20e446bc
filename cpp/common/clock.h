// Times and durations.
#pragma once

#include <cstdint>
#include <cstdio>
#include <ctime>
#include <limits>
#include <string>

namespace shoal {

// All times in the core are in nanoseconds.
constexpr std::int64_t kMillisecond = 1'000'000, kSecond = 1'000'000'000;
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kIdleMemoryTime = 2 * kSecond;  // maximum time for which unused memory is kept

inline std::int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * kSecond + now.tv_nsec;
}

// A duration for error messages: three significant digits, at most milliseconds; never in the form 1.8e+03 s
// or 2e-06 s.
inline std::string seconds(std::int64_t nanoseconds) {
  const double time = static_cast<double>(nanoseconds / kMillisecond) / 1000;
  char text[32];
  std::snprintf(text, sizeof text, time < 100 ? "%.3g s" : "%.0f s", time);
  return text;
}

}  // namespace shoal
