// The kinds of rounds.  The events of a round follow from its seed, their times do not.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "tests/watchdog.h"

namespace shoal::stress {

struct Tally {
  std::atomic<std::uint64_t> collectives{0};  // successful, counted once for the whole group
  std::atomic<std::uint64_t> failures{0};     // calls that failed because of an abort or a cut
  std::atomic<std::uint64_t> groups{0};
  std::atomic<std::uint64_t> aborts{0};
};

// A short life: a world, messages and collectives from two threads of each rank, a close, abort or cut.
void race(std::uint64_t seed, Watchdog& watchdog, Tally& tally);

// A long life: thousands of small collectives in groups that are made and closed, or aborted.
void live(std::uint64_t seed, Watchdog& watchdog, Tally& tally);

// A pairwise group: messages that either side cancels, and a lost rank.
void pairs(std::uint64_t seed, Watchdog& watchdog, Tally& tally);

// Movers that fail when they begin to move data, and later.
void failing_movers(Watchdog& watchdog);

// A frame that arrives while one thread stops reading a link and another is turned away.
void late_frames();

// Hostile peers: at least `frames` frames, most of them with an error, over sockets and rings, to a rank with
// groups and operations in flight; and overwritten words of shared memory during collectives.  Returns the
// number of frames sent.
std::uint64_t hostile(std::uint64_t seed, std::uint64_t frames, Watchdog& watchdog, Tally& tally);

// Posts that call each other while connections are cut and endpoints are closed.
void endpoints(std::uint64_t seed, Tally& tally);

// Peers that send an endpoint at least `frames` frames, some with an error.  Returns the number sent.
std::uint64_t lies(std::uint64_t seed, std::uint64_t frames, Tally& tally);

// Backward passes of the gradient reducer, on ranks that run one after another.
void passes(std::uint64_t seed);

// One agreement, in simulated time.
void agree(std::uint64_t seed, Tally& tally);

// One in which the decision of dead members arrives late.
void late_words_of_the_dead();

// Agreements of a group over real links.
void agree_over_links(std::uint64_t seed);

// The same agreement with each of two wrong quorum rules: a majority of those not known to be dead, and none.
// Returns whether surviving members decided differently.
std::array<bool, 2> disagree(std::uint64_t seed);

}  // namespace shoal::stress
