// Waiting without the GIL; the main thread checks for signals in between.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "common/clock.h"
#include "python/without_gil.h"

namespace shoal {

constexpr std::int64_t kSlice = 100 * kMillisecond;  // between two checks for signals in the main thread

// Calls `step(until)` without the GIL until it returns true or the deadline has passed.  After each call,
// runs `between` with the GIL and, in the main thread, signal handlers.
template <class Step, class Between>
bool wait_interruptibly(std::int64_t deadline, Step step, Between between) {
  const bool main = getpid() == gettid();
  while (true) {
    const std::int64_t now = now_ns();
    const std::int64_t until = main ? std::min(deadline, now + kSlice) : deadline;
    bool done;
    {
      const WithoutGil released;
      done = step(until);
    }
    between();
    if (done) return true;
    if (main && PyErr_CheckSignals() != 0) throw nanobind::python_error();
    if (now_ns() >= deadline) return false;
  }
}

template <class Step>
bool wait_interruptibly(std::int64_t deadline, Step step) {
  return wait_interruptibly(deadline, step, [] {});
}

inline std::int64_t deadline_of(nanobind::handle timeout) {
  const double seconds = timeout.is_none() ? 1e10 : PyFloat_AsDouble(timeout.ptr());
  if (seconds == -1.0 && PyErr_Occurred()) throw nanobind::python_error();
  return until(std::max(0.0, seconds));
}

}  // namespace shoal
