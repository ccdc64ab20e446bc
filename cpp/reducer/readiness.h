// Which gradients of a backward pass have arrived, and which buckets may be sent.
//
// Buckets are sent strictly in the order of their index, whatever the order in which they fill: collectives
// must be issued in the same order on every rank, and gradients may arrive differently on each.
//
// A gradient is complete when it has arrived as often as it is expected: once for each copy of the model in
// this process, or as often as in a pass that was learned from (a layer in several reentrant checkpoints).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace shoal::reducer {

// `mark` answers its caller with it.
enum class Mark : int {
  kIgnored = 0,     // no pass is open: the gradient is not to be reduced
  kArrived = 1,     // recorded
  kProceed = 2,     // it was the first one of the pass, or more buckets are ready: see arrived() and ready()
  kUnexpected = 3,  // it had arrived as often as expected, and its bucket may have been sent
};

// One pass after another: idle until arm() or open(); while armed the first gradient opens a pass; in an open
// pass every gradient is recorded; close() returns to idle, or to armed if no gradient came (a pass that only
// asked for the gradients of inputs).  Gradients that arrive while idle are ignored.  Not thread-safe.
class Readiness {
 public:
  // buckets: the members of each; together they are the indices 0 .. n-1, each once.
  // expected: for each parameter how often its gradient arrives in a pass; 0 if it never does.
  Readiness(std::span<const std::vector<std::uint32_t>> buckets, std::span<const std::uint32_t> expected);

  void arm() { armed_ = true; }
  void disarm() { armed_ = false; }
  void open() { open_ = true; }
  void close();

  Mark mark(std::uint32_t parameter);

  // No gradient of this parameter is expected in this pass.  Should one arrive before its bucket is ready, it
  // counts as ever.
  void skip(std::uint32_t parameter);

  // From now on nothing is ready and nothing unexpected: it is only counted what arrives.
  void learn() { learning_ = true; }

  bool opened() const { return open_; }
  // Buckets with an index below this are complete.
  std::size_t ready() const { return ready_; }
  // How many gradients have arrived in this pass.
  std::size_t arrived() const { return arrived_; }
  // How often the gradient of each parameter has arrived in this pass.
  const std::vector<std::uint32_t>& counts() const { return counts_; }
  // Parameters in the order in which their (last) gradients arrived in this pass.
  std::vector<std::uint32_t> arrival() const;
  // Parameters whose gradients are expected and not complete in this pass, ascending.
  std::vector<std::uint32_t> missing() const;

 private:
  bool complete(std::uint32_t parameter) const { return counts_[parameter] >= expected_[parameter]; }
  bool settle(std::uint32_t parameter);
  bool advance();

  std::vector<std::uint32_t> bucket_of_;  // by parameter
  std::vector<std::uint32_t> expected_;   // by parameter
  std::vector<std::uint32_t> sizes_;      // by bucket: members that are expected
  std::vector<std::uint32_t> pending_;    // by bucket: members that are expected and not settled
  std::vector<std::uint32_t> counts_;     // by parameter
  std::vector<bool> skipped_;             // by parameter
  std::vector<std::uint64_t> order_;      // by parameter: when it arrived last, counted from 1
  std::size_t arrived_ = 0;
  std::size_t ready_ = 0;
  bool armed_ = false;
  bool open_ = false;
  bool learning_ = false;
};

}  // namespace shoal::reducer
