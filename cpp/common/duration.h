// Formatting of a duration for error messages.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "common/clock.h"

namespace shoal {

// Three significant digits, at most milliseconds; never in the form 1.8e+03 s or 2e-06 s.
inline std::string seconds(std::int64_t nanoseconds) {
  const double time = static_cast<double>(nanoseconds / kMillisecond) / 1000;
  char text[32];
  std::snprintf(text, sizeof text, time < 100 ? "%.3g s" : "%.0f s", time);
  return text;
}

}  // namespace shoal
