// Which gradients of a backward pass have arrived, and which buckets may be sent.
//
// Buckets are sent in order of their index, whatever the order in which they fill: collectives must be issued
// in the same order on every rank, and gradients may arrive in a different order on each.
//
// A gradient is complete when it has arrived as often as expected: once per copy of the model in this
// process, or as often as in the pass that was learned from (a layer in several reentrant checkpoints).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace shoal::ddp {

// The result of `mark`.
enum class Mark : int {
  kIgnored = 0,     // no pass is open: the gradient is not reduced
  kArrived = 1,     // recorded
  kProceed = 2,     // it was the first of the pass, or more buckets are ready: see arrived() and ready()
  kUnexpected = 3,  // it had already arrived as often as expected, and its bucket may have been sent
};

// Successive passes: idle until arm() or open().  While armed, the first gradient opens a pass; in an open
// pass every gradient is recorded.  close() returns to idle, or to armed if no gradient arrived (only
// gradients of inputs were computed).  Gradients that arrive while idle are ignored.  Not thread-safe.
class Readiness {
 public:
  // buckets: the members of each; together they are the indices 0 .. n-1, each once.
  // expected: how often each parameter's gradient arrives in a pass; 0: never.
  Readiness(std::span<const std::vector<std::uint32_t>> buckets, std::span<const std::uint32_t> expected);

  void arm() { armed_ = true; }
  void disarm() { armed_ = false; }
  void open() { open_ = true; }
  void close();

  Mark mark(std::uint32_t parameter);

  // Expects no gradient of this parameter in this pass; one that arrives before its bucket is ready counts.
  void skip(std::uint32_t parameter);

  // From now on, nothing is ready or unexpected; arrivals are only counted.
  void learn() { learning_ = true; }

  bool opened() const { return open_; }
  // Buckets with a lower index are complete.
  std::size_t ready() const { return ready_; }
  // Number of gradients that have arrived in this pass.
  std::size_t arrived() const { return arrived_; }
  // How often the gradient of each parameter has arrived in this pass.
  const std::vector<std::uint32_t>& counts() const { return counts_; }
  // Parameters in the order in which their (last) gradients arrived in this pass.
  std::vector<std::uint32_t> arrival() const;
  // Parameters with expected gradients that are not complete in this pass, ascending.
  std::vector<std::uint32_t> missing() const;

 private:
  bool complete(std::uint32_t parameter) const { return counts_[parameter] >= expected_[parameter]; }
  bool settle(std::uint32_t parameter);
  bool advance();

  std::vector<std::uint32_t> bucket_of_;  // by parameter
  std::vector<std::uint32_t> expected_;   // by parameter
  std::vector<std::uint32_t> sizes_;      // by bucket: number of expected members
  std::vector<std::uint32_t> pending_;    // by bucket: number of expected members that are not settled
  std::vector<std::uint32_t> counts_;     // by parameter
  std::vector<bool> skipped_;             // by parameter
  std::vector<std::uint64_t> order_;      // by parameter: number of its last arrival, from 1
  std::size_t arrived_ = 0;
  std::size_t ready_ = 0;
  bool armed_ = false;
  bool open_ = false;
  bool learning_ = false;
};

}  // namespace shoal::ddp
