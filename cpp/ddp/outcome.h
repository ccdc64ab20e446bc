// The outcome of a pass, which the ranks exchange in addition to the gradients.
//
// Each rank reports whether its pass succeeded, and the number of forward passes since the last reduction,
// beyond the first.  The numbers must be equal: a rank that skipped a backward pass would otherwise silently
// average gradients of one step with those of the other ranks' next step.
//
// There are two encodings.  `flags` are a separate all-reduce with MAX, and also contain the parameters used
// on any rank.  A `tail` is three elements at the end of a bucket, averaged with it without another message.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace shoal::ddp {

inline constexpr std::uint32_t kMostExtra = 15;  // larger numbers of forward passes are not distinguished

struct Report {
  bool trouble = false;     // this rank's pass failed
  std::uint32_t extra = 0;  // forward passes beyond the first
};

struct Outcome {
  bool well = true;        // the pass succeeded on every rank
  std::vector<bool> used;  // by parameter: whether any rank had a gradient; empty if not requested
};

// Format: trouble, extra, kMostExtra - extra, then one per parameter.  The maximum over all ranks is the
// outcome: the second and third add up to kMostExtra only if they are equal on all ranks.
std::vector<std::uint8_t> encode_flags(Report report, const std::vector<bool>& used);
Outcome decode_flags(std::span<const std::uint8_t> maximum);  // throws std::invalid_argument if too short

// Format: trouble, extra, and its square.  The numbers of all ranks are equal exactly if the mean of the
// squares is the square of the mean, up to rounding.  All ranks get the same bits and decide alike; in half
// precision, rounding may hide a small difference between large numbers.
using Tail = std::array<double, 3>;
Tail encode_tail(Report report);
// epsilon: the distance from 1 to the next number of the mean's dtype.
bool decode_tail(const Tail& mean, double epsilon);

}  // namespace shoal::ddp
