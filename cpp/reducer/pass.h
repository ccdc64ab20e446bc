// One backward pass after another: when it opens, which buckets are sent when, whether it went well on every
// rank, and what the first one shows about those that follow.
//
// Everything that touches tensors or sends messages is done by a frontend, through four functions
// (`Actions`); the reducer of Python is one.  They are given with each call, so that a pass keeps nothing
// alive.
//
// A pass is *expected* by a forward pass.  It *opens* before its first gradient (a hook on the output of
// forward) or with it, *begins* with the first gradient, and is *finished* at the end of backward.  A pass
// that opened but never began only asked for the gradients of inputs, and the pass that was expected may yet
// come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "reducer/outcome.h"
#include "reducer/readiness.h"

namespace shoal::reducer {

// Stands for the outcome of a pass where a bucket's number is expected.
inline constexpr std::size_t kOutcome = ~std::size_t{0};

class Actions {
 public:
  virtual ~Actions() = default;
  // Bring gradients into a bucket that the hooks did not bring there, or zeros where there are none.  False:
  // no rank has a gradient in it, and it need not be sent; all ranks must answer alike.
  // kOutcome: write Pass::tail() into the tail, whose bucket was not sent yet.
  virtual bool fill(std::size_t bucket) = 0;
  // Start the reduction of a bucket.  kOutcome: the all-reduce of Pass::flags().
  virtual void send(std::size_t bucket) = 0;
  // Wait for the reduction of a bucket.  kOutcome: give what came of it to Pass::decode().
  virtual void wait(std::size_t bucket) = 0;
  // Give the averages to the optimiser: those of the parameters that any rank used.
  virtual void deliver(const std::vector<bool>& used) = 0;
};

// The same on every rank, but for `copies`.
struct Rules {
  bool find_unused = false;  // parameters may lack a gradient, others in each pass
  bool learn = false;        // all passes are alike, and the first one shows how often each gradient arrives
  bool fill_all = false;     // Actions::fill is asked for every bucket, not only where gradients may lack
  std::uint32_t copies = 1;  // copies of the model whose gradients are added up in this process
};

enum class End : int {
  kNothing = 0,  // no gradient came: the pass that was expected may yet come
  kWell = 1,     // the averages are delivered
  kTrouble = 2,  // on some rank gradients are missing, or the ranks are not in the same step
};

// Not thread-safe.  Exceptions of Actions leave the pass as it is; close() ends it.
class Pass {
 public:
  // buckets: the members of each; together they are the indices 0 .. n-1, each once.
  // expected: for each parameter how often its gradient arrives in a pass; 0 if it never does.
  Pass(Rules rules, std::span<const std::vector<std::uint32_t>> buckets, std::vector<std::uint32_t> expected);

  // Go on with other buckets and expectations; ends the pass.
  void rebuild(std::span<const std::vector<std::uint32_t>> buckets, std::vector<std::uint32_t> expected);

  // Whether the outcome takes a message of its own; if not, it is in the tail of the last bucket.
  bool separate() const { return separate_ || learning_ || rules_.find_unused; }
  void set_separate(bool separate) { separate_ = separate; }

  // -- forward passes

  // A forward pass whose backward pass is to be reduced.
  // counts: every rank runs it.  copies: how many copies of the model took part.
  void expect(bool counts, std::uint32_t copies);
  // A forward pass whose backward pass is to stay local, unless it comes together with one that is reduced.
  void ignore() { readiness_.disarm(); }

  // -- gradients

  void open() { readiness_.open(); }
  Mark mark(std::uint32_t parameter) { return readiness_.mark(parameter); }
  // The first gradient has come.  unreached: parameters that need not be waited for in this pass.
  void begin(Actions& actions, std::span<const std::uint32_t> unreached);
  // Send the buckets that are ready, in the order of their index.
  void launch(Actions& actions) { launch(actions, readiness_.ready()); }

  // -- the end

  // Send the other buckets, wait for all, and find out whether all ranks' passes went well.
  // interrupted: an exception ended this rank's pass.  shadow: this rank has no batch, and gives zeros.
  End finish(Actions& actions, bool interrupted, bool shadow);
  // For Actions::fill and send: what this rank says of the pass.
  // present: the parameters that have a gradient of earlier passes.
  Tail tail() const { return encode_tail(report()); }
  std::vector<std::uint8_t> flags(const std::vector<bool>& present) const;
  // For Actions::wait: what all ranks together said.
  void decode(const Tail& mean, double epsilon) { outcome_ = {decode_tail(mean, epsilon), used_}; }
  void decode(std::span<const std::uint8_t> flags) { outcome_ = decode_flags(flags); }
  // Forget the pass and what was expected.
  void close();

  // After the first pass that went well, once: the parameters in the order in which their gradients came,
  // then the others in the reverse of registration.
  std::optional<std::vector<std::uint32_t>> take_order();

  bool opened() const { return readiness_.opened(); }
  bool gaps() const { return gaps_; }               // some gradients may lack
  std::uint64_t number() const { return number_; }  // passes that were reduced
  Report report() const { return {trouble_, forwards_ > 0 ? forwards_ - 1 : 0}; }
  const std::vector<std::uint32_t>& expected() const { return expected_; }
  const Readiness& readiness() const { return readiness_; }
  // Parameters whose gradients should have come and did not, ascending.
  std::vector<std::uint32_t> missing() const;

 private:
  void launch(Actions& actions, std::size_t end);
  void learn();

  Rules rules_;
  std::vector<std::uint32_t> expected_;  // by parameter
  std::vector<bool> used_;  // by parameter: has a gradient on some rank, in passes that are alike
  std::size_t buckets_;
  Readiness readiness_;
  bool separate_ = false;
  bool learning_;
  bool order_is_known_ = false;
  std::optional<std::vector<std::uint32_t>> order_;
  std::uint64_t number_ = 0;

  // of the pass that comes or runs
  std::uint32_t forwards_ = 0;  // since the last reduction
  std::uint32_t copies_ = 0;    // of the model that took part
  bool gaps_ = false;
  bool trouble_ = false;
  std::vector<bool> sent_;  // by bucket, for those that were launched: false if no rank needs it
  Outcome outcome_;
};

}  // namespace shoal::reducer
