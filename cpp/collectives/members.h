// Algorithms among an ordered list of ranks that exchange data over links: the members of a group, or one
// member of each host.
//
// Partial results are in the accumulator's type.  Each function takes steps (numbers of messages) from `step`
// on, at most kSteps.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/collectives.h"
#include "engine/messages.h"

namespace shoal::collectives {

constexpr std::uint32_t kSteps = 4096;

class Members {
 public:
  // self: index of this rank among `ranks`.
  Members(std::vector<int> ranks, int self) : ranks_(std::move(ranks)), self_(self) {}

  int size() const { return static_cast<int>(ranks_.size()); }
  int self() const { return self_; }
  // index: any number; the list is circular.
  int rank(int index) const { return ranks_[wrapped(index)]; }
  int wrapped(int index) const { return (index % size() + size()) % size(); }

 private:
  std::vector<int> ranks_;
  int self_;
};

// Send and receive data in pieces that need no grant, up to 16 MB and while less than 8 MB are unread: the
// grant of a longer message could wait behind what its receiver sends at the same time.
void send_pieces(Messages& messages, int to, std::uint32_t step, const std::byte* data, std::uint64_t bytes);
void receive_pieces(Messages& messages, int from, std::uint32_t step, std::byte* data, std::uint64_t bytes);

// The algorithm for an operation: the choice of the group, or the one that takes the shortest time by the
// model of docs/algorithms.md.
//
// bytes, wide: bytes of one member's data (of all parts together), in the tensor's and in the accumulator's
// type.  at_once: the direct algorithm for small data has a single step, in which all send everything.
Algorithm algorithm_for(Algorithm choice, Kind kind, int members, std::uint64_t bytes, std::uint64_t wide,
                        bool at_once);

// The bytes of a reduction up to which the direct algorithm sends everything at once.
std::uint64_t at_once_limit(int members);

// The index of the first element, or byte, of each block, and of the end.
using Edges = std::vector<std::uint64_t>;

// All-reduce (root < 0) of partial results; writes all of `finished` in the tensor's type.  Or reduce to the
// member with index `root`, which alone writes `finished`.  `partial` is changed.
Task reduce_partials(Operation& op, const Members& members, Algorithm algorithm, std::byte* partial,
                     std::uint64_t elements, std::byte* finished, int root, std::uint32_t step);

// Reduce-scatter by halving or in a ring: writes block `self` of the result to `finished`, in the tensor's
// type.  `partial` is changed.
Task scatter_partials(Operation& op, const Members& members, Algorithm algorithm, std::byte* partial,
                      const Edges& elements, std::byte* finished, std::uint32_t step);
// All-gather by doubling or in a ring: completes `data`, of which this member has block `self`.
Task gather_blocks(Operation& op, const Members& members, Algorithm algorithm, std::byte* data,
                   const Edges& bytes, std::uint32_t step);

Task barrier(Operation& op, Members members);
Task broadcast(Operation& op, Members members, Span data, int root);  // root: an index

}  // namespace shoal::collectives
