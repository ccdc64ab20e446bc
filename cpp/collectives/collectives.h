// The algorithms.  docs/algorithms.md lists the steps and bytes of each.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "engine/operation.h"

namespace shoal::collectives {

// The coroutine of an operation; selects the algorithm by topology and size.
Task start(Operation& op);

// Within one host (dispatch.cc, exchange.cc, all_reduce.cc).
Task shared(Operation& op);
// Over links, for any topology (over_links.cc); also for operations issued in callbacks, which have no lane.
Task over_links(Operation& op);
// For several hosts, some with several members (hierarchical.cc).
Task hierarchical(Operation& op);
Task send(Operation& op);
Task receive(Operation& op);

inline Span slice(const Span& whole, std::uint64_t offset, std::uint64_t bytes) {
  return {whole.data + offset, bytes};
}

// Longer data is sent piece by piece: a message of this size needs no grant, and a piece can be used when it
// arrives.
constexpr std::uint64_t kPiece = kEager;
inline std::uint32_t pieces_of(std::uint64_t bytes) {
  return static_cast<std::uint32_t>((bytes + kPiece - 1) / kPiece);
}

// Copies within this process; the spans may overlap or be equal.
inline void copy(const Span& to, const Span& from) {
  if (to.bytes > 0 && to.data != from.data) std::memmove(to.data, from.data, to.bytes);
}

// The elements [first, last) of part `index` of `parts`, in whole cache lines if possible.
inline std::pair<std::uint64_t, std::uint64_t> share(std::uint64_t count, std::size_t item, int parts,
                                                     int index) {
  std::uint64_t line = item < 64 ? 64 / item : 1;
  std::uint64_t lines = (count + line - 1) / line;
  auto edge = [&](int i) {
    std::uint64_t at = lines * static_cast<std::uint64_t>(i) / static_cast<std::uint64_t>(parts) * line;
    return at < count ? at : count;
  };
  return {edge(index), edge(index + 1)};
}

// Splits spans that may be given as one buffer into equal parts.
std::vector<Span> parts_of(const std::vector<Span>& spans, int parts);

}  // namespace shoal::collectives
