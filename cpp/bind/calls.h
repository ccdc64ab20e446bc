// Sizes and times of calls, for all files of the binding.
#pragma once

#include <cstdint>

#include "engine/clock.h"

namespace shoal {

constexpr std::uint64_t kInlineSubmit = 32 * 1024;  // larger operations are submitted without the GIL

inline std::int64_t nanoseconds(double seconds) {
  return seconds > 1e9 ? std::int64_t{1'000'000'000} * 1'000'000'000
                       : static_cast<std::int64_t>(seconds * 1e9);
}

inline std::int64_t until(double seconds) { return now_ns() + nanoseconds(seconds); }

}  // namespace shoal
