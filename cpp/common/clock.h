#pragma once

#include <cstdint>
#include <ctime>

namespace shoal {

// All times in the core are in nanoseconds.
constexpr std::int64_t kMillisecond = 1'000'000, kSecond = 1'000'000'000;

inline std::int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * kSecond + now.tv_nsec;
}

}  // namespace shoal
