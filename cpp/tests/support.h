// Random numbers, error reports and the clock, for all scenes of the stress test.
#pragma once

#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <random>
#include <string>
#include <thread>
#include <vector>

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

// Runs `run(rank)` for each rank, in threads.
template <class Run>
void run_ranks(int size, Run run) {
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back([&run, rank] { run(rank); });
}

// The ends of a new connection.
inline std::array<int, 2> connected_sockets(int flags = 0) {
  std::array<int, 2> ends;
  check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0, ends.data()) == 0, "socketpair failed");
  return ends;
}

inline void dawdle(Random& random) {
  int what = pick(random, 0, 9);
  if (what == 0)
    nap(random, 1, 500);
  else if (what < 3)
    std::this_thread::yield();
}

}  // namespace shoal::stress
