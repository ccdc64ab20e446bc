#pragma once

#include <cstdint>
#include <ctime>
#include <limits>

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

}  // namespace shoal
