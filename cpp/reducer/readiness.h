// Which gradients of a backward pass have arrived, and which buckets may be sent.
//
// Buckets are sent strictly in the order of their index, whatever the order in which they fill: collectives
// must be issued in the same order on every rank, and gradients may arrive differently on each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace shoal::reducer {

// What the caller of `mark` has to do.
enum class Mark : int {
  kNothing = 0,
  kAttend = 1,  // the pass began with this gradient, or more buckets are ready: see opened() and ready()
  kTwice = 2,   // the gradient had arrived in this pass before
};

// One pass after another: idle until arm() or open(); while armed the first gradient opens a pass; in an open
// pass every gradient is recorded; close() returns to idle, or to armed if no gradient came (a pass that only
// asked for the gradients of inputs).  Gradients that arrive while idle are ignored.  Not thread-safe.
class Readiness {
 public:
  // buckets: the members of each; together they are the indices 0 .. n-1, each once.
  explicit Readiness(std::span<const std::vector<std::uint32_t>> buckets);

  void arm() { armed_ = true; }
  void disarm() { armed_ = false; }
  void open() { open_ = true; }
  void close();

  Mark mark(std::uint32_t parameter);

  bool opened() const { return open_; }
  // Buckets with an index below this are complete.
  std::size_t ready() const { return ready_; }
  // Gradients that have arrived in this pass.
  std::size_t arrived() const { return arrival_.size(); }
  // Parameters in the order in which their gradients arrived in this pass.
  const std::vector<std::uint32_t>& arrival() const { return arrival_; }
  // Parameters whose gradients have not arrived in this pass, ascending.
  std::vector<std::uint32_t> missing() const;

 private:
  std::vector<std::uint32_t> bucket_of_;  // by parameter
  std::vector<std::uint32_t> sizes_;      // by bucket: members
  std::vector<std::uint32_t> pending_;    // by bucket: members that have not arrived
  std::vector<bool> arrived_;             // by parameter
  std::vector<std::uint32_t> arrival_;
  std::size_t ready_ = 0;
  bool armed_ = false;
  bool open_ = false;
};

}  // namespace shoal::reducer
