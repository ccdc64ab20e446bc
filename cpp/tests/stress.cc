// Random rounds of the core, with ranks as threads of one process and events at random times.
//
//   stress [--operations N | --seconds S | --frames N | --passes N | --endpoints N | --packets N |
//           --agreements N] [--seed K] [--patience S]
//
// Runs rounds with the seeds K, K+1, ... until N collectives have succeeded, or for S seconds.  Every result
// is checked bit by bit.  A failure names the seed of its round, which repeats it alone (`--seed K
// --operations 1`): the events of a round follow from the seed, their times do not.
//
// With --frames, peers send N frames that violate the protocol (hostile.cc).  With --passes, N rounds of
// backward passes are compared with a model of the gradient reducer (passes.cc).  With --endpoints, N rounds
// of calls run between RPC endpoints, and with --packets, peers of an endpoint send N frames (endpoints.cc,
// packets.cc).  With --agreements, N agreements are simulated, and a fifth as many with each of two wrong
// rules, for which a disagreement must be found (agreement.cc).
//
// Limits of the thread sanitizer: ranks access each other's memory through separate mappings, so the same
// byte has a different address on each rank.  Races between the threads of a rank are found, races between
// ranks are not; the checks of the results are for those.

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

#include "common/clock.h"
#include "tests/scenes.h"
#include "tests/support.h"

// As in cpp/net/ring_link.h, for TCP: reads for sending are ignored.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "intercept_send=0";
}

// A message may claim any length: running out of memory for it is an error of the peer, not of the core.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}

namespace {

using namespace shoal::stress;

struct Options {
  std::uint64_t operations = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t seconds = 0;
  std::uint64_t frames = 0;
  std::uint64_t passes = 0;
  std::uint64_t endpoints = 0;
  std::uint64_t packets = 0;
  std::uint64_t agreements = 0;
  std::uint64_t seed = 1;
  std::uint64_t patience = 60;
};

constexpr std::pair<const char*, std::uint64_t Options::*> kOptions[] = {
    {"--operations", &Options::operations}, {"--seconds", &Options::seconds},
    {"--frames", &Options::frames},         {"--passes", &Options::passes},
    {"--endpoints", &Options::endpoints},   {"--packets", &Options::packets},
    {"--agreements", &Options::agreements}, {"--seed", &Options::seed},
    {"--patience", &Options::patience}};

bool parse(int count, char** arguments, Options& options) {
  for (int i = 1; i < count; i += 2) {
    const auto found = std::ranges::find_if(
        kOptions, [&](const auto& option) { return std::strcmp(option.first, arguments[i]) == 0; });
    if (found == std::end(kOptions) || i + 1 == count) return false;
    const char* end = arguments[i + 1] + std::strlen(arguments[i + 1]);
    auto [stop, error] = std::from_chars(arguments[i + 1], end, options.*found->second);
    if (error != std::errc() || stop != end) return false;
  }
  if (options.seconds == 0 && options.operations == std::numeric_limits<std::uint64_t>::max())
    options.seconds = 10;
  return true;
}

unsigned long long printable(std::uint64_t number) { return number; }

}  // namespace

int main(int count, char** arguments) {
  Options options;
  if (!parse(count, arguments, options)) {
    std::fprintf(
        stderr,
        "usage: %s [--operations N | --seconds S | --frames N | --passes N | --endpoints N | --packets "
        "N | --agreements N] [--seed K] [--patience S]\n",
        arguments[0]);
    return 2;
  }
  Tally tally;
  Watchdog watchdog(static_cast<int>(options.patience));
  const std::int64_t begin = shoal::now_ns();
  auto elapsed = [&] { return static_cast<double>(shoal::now_ns() - begin) / 1e9; };
  std::uint64_t seed = options.seed;
  auto rounds = [&](std::uint64_t number, auto&& round) {
    for (seed = options.seed; seed < options.seed + number; ++seed) {
      watchdog.begin_round(seed);
      round();
    }
  };
  // Rounds of peers that send at most 1,000 frames each.
  auto send = [&](std::uint64_t frames, auto&& round) {
    std::uint64_t sent = 0;
    for (; sent < frames; ++seed) {
      watchdog.begin_round(seed);
      sent += round(std::min<std::uint64_t>(frames - sent, 1000));
    }
    return sent;
  };
  if (options.frames > 0) {
    const std::uint64_t sent =
        send(options.frames, [&](std::uint64_t most) { return hostile(seed, most, watchdog, tally); });
    std::printf(
        "%llu frames of hostile peers in %llu rounds and %.1f s: %llu connections refused, %llu groups\n",
        printable(sent), printable(seed - options.seed), elapsed(), printable(tally.failures),
        printable(tally.groups));
    return 0;
  }
  if (options.passes > 0) {
    rounds(options.passes, [&] { passes(seed); });
    std::printf("%llu rounds of backward passes, all right, in %.1f s\n", printable(options.passes),
                elapsed());
    return 0;
  }
  if (options.endpoints > 0) {
    rounds(options.endpoints, [&] { endpoints(seed, tally); });
    std::printf("%llu rounds of endpoints in %.1f s: %llu calls answered, %llu ended otherwise\n",
                printable(options.endpoints), elapsed(), printable(tally.collectives),
                printable(tally.failures));
    return 0;
  }
  if (options.packets > 0) {
    const std::uint64_t sent =
        send(options.packets, [&](std::uint64_t most) { return lies(seed, most, tally); });
    std::printf("%llu frames of peers of an endpoint in %.1f s: %llu connections refused\n", printable(sent),
                elapsed(), printable(tally.failures));
    return 0;
  }
  if (options.agreements > 0) {
    late_words_of_the_dead();
    rounds(options.agreements, [&] {
      agree(seed, tally);
      if (seed % 500 == 1) agree_over_links(seed);
    });
    // A single round is repeated to see its events.
    const std::uint64_t wrong = options.agreements / 5;
    std::array<std::uint64_t, 2> caught{};
    rounds(wrong, [&] {
      const auto found = disagree(seed);
      for (std::size_t rule = 0; rule < caught.size(); ++rule) caught[rule] += found[rule];
    });
    std::printf(
        "%llu agreements, all right, in %.1f s: %llu decided, %llu of them otherwise by a member that "
        "died; of %llu with a wrong rule, %llu and %llu disagreed\n",
        printable(options.agreements), elapsed(), printable(tally.collectives), printable(tally.failures),
        printable(wrong), printable(caught[0]), printable(caught[1]));
    if (wrong >= 10000)
      for (std::uint64_t found : caught) check(found > 0, "a wrong rule is not caught");
    return 0;
  }
  late_frames();
  failing_movers(watchdog);
  do {
    watchdog.begin_round(seed);
    (seed % 2 ? live : seed % 4 ? pairs : race)(seed, watchdog, tally);
    ++seed;
  } while (tally.collectives < options.operations &&
           (options.seconds == 0 || elapsed() < static_cast<double>(options.seconds)));
  std::printf(
      "%llu collectives, all right, in %llu rounds (seeds %llu to %llu) and %.1f s: %llu groups, %llu of "
      "them aborted, %llu calls ended by that or by a cut connection\n",
      printable(tally.collectives), printable(seed - options.seed), printable(options.seed),
      printable(seed - 1), elapsed(), printable(tally.groups), printable(tally.aborts),
      printable(tally.failures));
  return 0;
}
