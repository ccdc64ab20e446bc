// The outcome of a pass: the ranks tell one another whether it went well, besides the gradients.
//
// Each rank says whether its own pass went well, and how many forward passes it ran since the last reduction,
// beyond the first.  The numbers must be equal: a rank that left out a backward pass would otherwise average
// the gradients of one step with those of the other ranks' next step, without any error.
//
// There are two encodings.  `flags` travel in a message of their own, an all-reduce with MAX, and also say
// which parameters were used on any rank.  A `tail` is three elements at the end of a bucket, which are
// averaged with it and cost no message.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace shoal::reducer {

inline constexpr std::uint32_t kMostExtra = 15;  // larger numbers of forward passes are not told apart

struct Report {
  bool trouble = false;     // this rank's pass went wrong
  std::uint32_t extra = 0;  // forward passes beyond the first
};

struct Outcome {
  bool well = true;        // the pass went well on every rank
  std::vector<bool> used;  // by parameter: whether any rank had a gradient of it; empty if it was not asked
};

// trouble, extra, kMostExtra - extra, then one for each parameter; the maximum over all ranks is the outcome,
// because the second and third add up to kMostExtra only if all ranks said the same.
std::vector<std::uint8_t> encode_flags(Report report, const std::vector<bool>& used);
Outcome decode_flags(
    std::span<const std::uint8_t> maximum);  // throws std::invalid_argument if it is too short

// trouble, extra and its square.  The numbers of all ranks are equal exactly if the mean of the squares is
// the square of the mean, up to rounding.  All ranks see the same bits and decide alike; in half precision
// rounding may hide a small difference between large numbers.
using Tail = std::array<double, 3>;
Tail encode_tail(Report report);
// epsilon: the distance from 1 to the next number of the dtype that the mean was computed in.
bool decode_tail(const Tail& mean, double epsilon);

}  // namespace shoal::reducer
