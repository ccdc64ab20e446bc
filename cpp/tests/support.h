// Random numbers, error reports and the clock, for all scenes of the stress test.
#pragma once

#include <chrono>
#include <cstdint>
#include <random>
#include <string>
#include <thread>

#include "common/clock.h"

namespace shoal::stress {

using Random = std::mt19937_64;

constexpr std::int64_t kPatience = 600 * kSecond;  // of operations: the watchdog detects hangs

// Prints the problem and the seed of the round, then aborts.
[[noreturn]] void die(const std::string& what);

inline void check(bool good, const std::string& what) {
  if (!good) die(what);
}

inline int pick(Random& random, int from, int to) {
  return std::uniform_int_distribution<int>(from, to)(random);
}

inline bool chance(Random& random, int one_in) { return pick(random, 1, one_in) == 1; }

inline void nap(Random& random, int from, int to) {
  std::this_thread::sleep_for(std::chrono::microseconds(pick(random, from, to)));
}

inline void dawdle(Random& random) {
  int what = pick(random, 0, 9);
  if (what == 0)
    nap(random, 1, 500);
  else if (what < 3)
    std::this_thread::yield();
}

}  // namespace shoal::stress
