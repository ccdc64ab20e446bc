// Which gradient lies in which bucket, and where in it.
//
// Gradients are reduced in buckets, because one large all-reduce is cheaper than many small ones; a bucket is
// sent when its last gradient is there, so gradients that arrive together belong together.  The caller gives
// the order in which they are expected: the reverse of registration until a backward pass was seen, then the
// order of arrival in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace shoal::reducer {

// Every gradient starts on a cache line of its own.
inline constexpr std::uint64_t kAlignment = 64;

struct Parameter {
  std::uint64_t bytes;
  std::uint32_t kind;  // parameters of different kinds (dtype, device) never share a bucket
};

struct Bucket {
  std::vector<std::uint32_t> members;  // indices of parameters, in the expected order of arrival
  std::vector<std::uint64_t> offsets;  // in bytes, one for each member
  std::uint64_t bytes = 0;             // the whole bucket, a multiple of kAlignment
};

// Buckets in the order in which they are expected to fill.  Each kind's first bucket holds at most
// `first_cap` bytes, so that communication starts early, the others at most `cap`; a parameter larger than
// that has a bucket of its own.  Throws std::invalid_argument unless `order` is a permutation of the
// parameters' indices.
std::vector<Bucket> assign(std::span<const Parameter> parameters, std::span<const std::uint32_t> order,
                           std::uint64_t first_cap, std::uint64_t cap);

}  // namespace shoal::reducer
