// Assignment of gradients to buckets.
//
// Gradients are reduced in buckets, because one large all-reduce is cheaper than many small ones.  A bucket
// is sent when its last gradient has arrived, so gradients that arrive together belong together.  The caller
// passes their expected order: the reverse of registration at first, then the order of arrival in the first
// backward pass.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace shoal::ddp {

// Every gradient starts on a new cache line.
inline constexpr std::uint64_t kAlignment = 64;

struct Parameter {
  std::uint64_t bytes;
  std::uint32_t kind;  // parameters of different kinds (dtype, device) never share a bucket
};

struct Bucket {
  std::vector<std::uint32_t> members;  // indices of parameters, in the expected order of arrival
  std::vector<std::uint64_t> offsets;  // in bytes, one for each member
  std::uint64_t bytes = 0;             // of the whole bucket, a multiple of kAlignment
};

// Returns buckets in the order in which they are expected to fill.  Each kind's first bucket has at most
// `first_cap` bytes, so that communication starts early, the others at most `cap`; a larger parameter has its
// own bucket.  Throws std::invalid_argument unless `order` is a permutation of the parameters' indices.
std::vector<Bucket> assign(std::span<const Parameter> parameters, std::span<const std::uint32_t> order,
                           std::uint64_t first_cap, std::uint64_t cap);

}  // namespace shoal::ddp
