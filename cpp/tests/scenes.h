// The kinds of rounds.  What happens in a round follows from its seed, when it happens does not.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "tests/watchdog.h"

namespace shoal::stress {

struct Tally {
  std::atomic<std::uint64_t> collectives{0};  // that ended well, counted once for the whole group
  std::atomic<std::uint64_t> failures{0};     // calls that an abort or a cut ended
  std::atomic<std::uint64_t> groups{0};
  std::atomic<std::uint64_t> aborts{0};
};

// A short life: a world, messages and collectives from two threads of each rank, a peaceful or violent end.
void race(std::uint64_t seed, Watchdog& watchdog, Tally& tally);

// A long life: thousands of small collectives in groups that come and go, some of them by an abort.
void live(std::uint64_t seed, Watchdog& watchdog, Tally& tally);

// A group of pairs: messages that either side takes back, and a rank that is lost.
void pairs(std::uint64_t seed, Watchdog& watchdog, Tally& tally);

// A frame that comes while one thread stops to read a link, and another one is turned away.
void late_frames();

// Hostile peers: at least so many frames, most of them wrong somewhere, over sockets and rings, to a rank
// with groups and operations in flight; and words of shared memory overwritten under collectives.  Returns
// how many frames were sent.
std::uint64_t hostile(std::uint64_t seed, std::uint64_t frames, Watchdog& watchdog, Tally& tally);

// Posts that call one another while connections are cut and posts end.
void posts(std::uint64_t seed, Tally& tally);

// Peers that send a post at least so many frames, some of them wrong somewhere.  Returns how many were sent.
std::uint64_t lies(std::uint64_t seed, std::uint64_t frames, Tally& tally);

// Backward passes of the gradient reducer, on ranks that run one after another.
void passes(std::uint64_t seed);

// One agreement, in simulated time.
void agree(std::uint64_t seed, Tally& tally);

// One in which the decision of members that have died arrives late.
void late_words_of_the_dead();

// Agreements of a group over real links.
void agree_over_links(std::uint64_t seed);

// The same agreement with each of two wrong rules for quorums: a majority of those not known dead, and none.
// Returns whether members that lived had decided differently.
std::array<bool, 2> disagree(std::uint64_t seed);

}  // namespace shoal::stress
