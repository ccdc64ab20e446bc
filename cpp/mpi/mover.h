// Moves the data of a group's collectives by an MPI library.
//
// Data is passed to MPI as elements of a size.  Reductions are computed by shoal's kernels, in the order of
// the ranks and rounded once: MPI has no bfloat16, and does not promise equal bits on all ranks.  In an
// all-reduce each rank reduces a part, and sends the result to the others; in a small one each rank reduces
// all inputs.  On request, MPI computes the reductions that it has.
//
// In a small group, parts are passed by single messages, which is faster than the nonblocking collectives of
// MPI libraries.  In a larger one they are passed by collectives, because the library knows the network.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "mpi/library.h"

namespace shoal::mpi {

// A reduction of MPI: its datatype and operation, and whether it is divided by the number of ranks.
struct MpiReduction {
  Handle type, op;
  bool averages;
};

class MpiMover final : public Mover {
 public:
  struct Options {
    int rank = 0, size = 1;
    std::vector<Handle> comms;            // one for each lane
    std::map<std::size_t, Handle> types;  // by the bytes of an element
    // By dtype and reduction; shoal computes all others.
    std::map<std::pair<int, int>, MpiReduction> reductions;
    bool exchanges = true;  // parts are passed by single messages; the same on all members
  };
  MpiMover(std::shared_ptr<Library> library, Options options);

  Task move(Operation& op) override;

 private:
  struct LaneState {
    Handle comm;
    // Memory for the next operation: new pages take longer than the rest of a large operation.
    std::unique_ptr<std::byte[]> kept;
    std::size_t kept_bytes = 0;
  };
  class Scratch;
  class Joined;

  Task all_reduce(Operation& op, LaneState& lane);
  Task reduce(Operation& op, LaneState& lane);
  Task broadcast(Operation& op, LaneState& lane);
  Task all_gather(Operation& op, LaneState& lane);
  Task gather(Operation& op, LaneState& lane);
  Task scatter(Operation& op, LaneState& lane);
  Task reduce_scatter(Operation& op, LaneState& lane);
  Task all_to_all(Operation& op, LaneState& lane);
  Task reduce_scatter_into(Operation& op, LaneState& lane, Span x, const Counts& counts, std::byte* mine);

  Parts none_of(void* data, Handle type, std::size_t item) const;
  void begin_all_to_all(LaneState& lane, Parts from, Parts to, Call& call) const;
  void begin_all_gather(LaneState& lane, Span own, const Parts& parts, Call& call) const;
  void begin_gather(LaneState& lane, Span own, const Parts& parts, int root, Call& call) const;

  const MpiReduction* reduction_of(const Request& request) const;
  Handle type_of(const Request& request) const;
  bool is_small(std::uint64_t bytes, std::uint64_t limit) const;
  Counts shares(std::uint64_t count, std::size_t item) const;
  void reduce_gathered(const Request& request, const std::byte* gathered, Span to) const;
  void reduce_parts(const Request& request, const std::vector<const void*>& parts, void* to,
                    std::uint64_t count) const;
  void divide(const Request& request, const MpiReduction& reduction, void* data, std::uint64_t count) const;

  std::shared_ptr<Library> library_;
  Options options_;
  int rank_;
  std::size_t size_, self_;
  std::vector<LaneState> lanes_;
};

}  // namespace shoal::mpi
