// Waiting without the GIL, with looks for signals in the main thread.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "base/clock.h"
#include "base/duration.h"

namespace shoal {

constexpr std::int64_t kSlice = 100 * kMillisecond;  // between two looks for signals, in the main thread

// Calls `step(until)` without the GIL until it is true or time is over; in the main thread with signals'
// handlers in between.  `between` runs with the GIL after each.
template <class Step, class Between>
bool in_slices(std::int64_t deadline, Step step, Between between) {
  const bool main = getpid() == gettid();
  while (true) {
    const std::int64_t now = now_ns();
    const std::int64_t until = main ? std::min(deadline, now + kSlice) : deadline;
    bool done;
    {
      nanobind::gil_scoped_release release;
      done = step(until);
    }
    between();
    if (done) return true;
    if (main && PyErr_CheckSignals() != 0) throw nanobind::python_error();
    if (now_ns() >= deadline) return false;
  }
}

template <class Step>
bool in_slices(std::int64_t deadline, Step step) {
  return in_slices(deadline, step, [] {});
}

inline std::int64_t deadline_of(nanobind::handle timeout) {
  const double seconds = timeout.is_none() ? 1e10 : PyFloat_AsDouble(timeout.ptr());
  if (seconds == -1.0 && PyErr_Occurred()) throw nanobind::python_error();
  return until(std::max(0.0, seconds));
}

}  // namespace shoal
