// Requests from the arguments of a program, for the bindings of Python and C.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "collectives/collectives.h"
#include "common/clock.h"
#include "engine/group.h"

namespace shoal {

// The key of the future of a numbered operation, as in shoal/group/submission.py.  The factor is odd, so that
// its multiples are distinct modulo 2**64.
inline std::uint64_t future_key(std::uint64_t group, std::uint64_t number) {
  return group + number * 0x9E3779B97F4A7C15ULL;
}

inline std::int64_t nanoseconds(double seconds) {
  return seconds > 1e9 ? std::int64_t{1'000'000'000} * 1'000'000'000
                       : static_cast<std::int64_t>(seconds * 1e9);
}

inline std::int64_t until(double seconds) { return now_ns() + nanoseconds(seconds); }

// Whether the request is so small that it is submitted with the GIL held.  A library that moves data may need
// the GIL itself, for functions of the program.
inline bool is_quick(const Request& request) { return request.bytes() < 32 * 1024 && !request.external; }

inline Request new_request(Kind kind, double timeout) {
  Request request(kind, collectives::start);
  request.timeout = nanoseconds(timeout);
  return request;
}

// Without channel and tensors.
inline Request collective_request(const Group& group, Kind kind, DType dtype, RedOp op, std::uint64_t count,
                                  int root, double timeout) {
  Request request = new_request(kind, timeout);
  request.external = group.moved() && kind != Kind::kBarrier;
  request.reduction = {dtype, op, static_cast<std::uint32_t>(group.size())};
  request.count = count;
  request.root = root;
  return request;
}

// A message without its tensor, which has at most kMaxDims lengths `dims`.
template <typename Dims>
Request message_request(Kind kind, DType dtype, const Dims& dims, int peer, std::uint64_t tag,
                        double timeout) {
  Request request = new_request(kind, timeout);
  request.peer = peer;
  request.tag = tag;
  request.shape.dtype = static_cast<std::uint8_t>(dtype);
  request.shape.dims = static_cast<std::uint8_t>(std::size(dims));
  std::ranges::copy(dims, request.shape.sizes);
  return request;
}

// Whether an output shares memory with another one, or with an input; with `in_place`, an input may be at the
// same place as an output.
inline bool overlapping(const Request& request, bool in_place) {
  const auto same = [](const Span& a, const Span& b) { return a.data == b.data && a.bytes == b.bytes; };
  for (std::size_t i = 0; i < request.out.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j)
      if (overlap(request.out[i], request.out[j])) return true;
    for (const Span& input : request.in)
      if (overlap(request.out[i], input) && !(in_place && same(input, request.out[i]))) return true;
  }
  return false;
}

}  // namespace shoal
