// Votes and decisions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "consensus/rank_set.h"

namespace shoal::consensus {

// The call that a vote belongs to, which also determines how votes are combined:
//   kAnd to kSum: a vote is a signed integer of 8 bytes; sums wrap.
//   kCommon: a vote is a list of ascending integers of 8 bytes; the value is their intersection.
//   kGather: a vote is any bytes; the value is the list of votes.
enum class Op : std::uint8_t {
  kDiffers = 0,  // decisions only: the members called with different ops
  kAnd = 1,
  kOr = 2,
  kMin = 3,
  kMax = 4,
  kSum = 5,
  kCommon = 6,
  kGather = 7,
  kRebuild = 8,  // like kGather
  kGrow = 9,     // like kAnd; no surviving member is left out for being late
};

inline bool gathers(Op op) { return op == Op::kGather || op == Op::kRebuild; }

// Maximum bytes of one vote.  All votes of a group together stay below 4 MiB.
constexpr std::size_t vote_limit(int size) {
  constexpr std::size_t each = 4096, together = std::size_t{4} << 20;
  const std::size_t share = together / static_cast<std::size_t>(size) / 8 * 8;
  return share < each ? share : each;
}

struct Vote {
  Op op = Op::kAnd;
  std::string value;
  bool operator==(const Vote&) const = default;
};

struct Decision {
  Op op = Op::kDiffers;
  // kGather, kRebuild: for each rank, ascending, 4 bytes of length and its vote.  kDiffers: for each rank,
  // ascending, its op in one byte.
  std::string value;
  // The ranks of the votes.  They continue and all others are lost; after kDiffers all continue.
  RankSet ranks;
  bool operator==(const Decision&) const = default;
  bool keeps(int rank) const { return op == Op::kDiffers || ranks.has(rank); }
};

// A decision that a member has accepted, but that is not necessarily decided.
struct Accepted {
  std::uint64_t ballot = 0;
  Decision decision;
};

// Combines at least one vote; the ranks are distinct and ascending.
Decision combine(int size, const std::vector<std::pair<int, const Vote*>>& votes);

// Returns a description of the flaw of a vote or decision in a group of `size`; null if valid.
const char* invalid_reason(const Vote& vote, int size);
const char* invalid_reason(const Decision& decision, int size);

}  // namespace shoal::consensus
