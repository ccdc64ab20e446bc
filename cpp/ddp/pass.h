// The state machine of backward passes: when they open, which buckets are sent when, whether they succeeded
// on all ranks, and the order of gradients learned from the first.
//
// A frontend, such as the reducer in Python, handles tensors and messages through four functions (`Actions`).
// They are passed to each call, so that a pass holds no references.
//
// A pass is *expected* by a forward pass.  It *opens* before its first gradient (a hook on the output of
// forward) or with it, *begins* with the first gradient, and is *finished* at the end of backward.  A pass
// that opened but did not begin computed only gradients of inputs; the expected pass may still come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ddp/outcome.h"
#include "ddp/readiness.h"

namespace shoal::ddp {

// Used instead of a bucket's index: the outcome of a pass.
inline constexpr std::size_t kOutcome = ~std::size_t{0};

class Actions {
 public:
  virtual ~Actions() = default;
  // Copy gradients that the hooks did not copy into a bucket, with zeros for missing ones.  False: no rank
  // has a gradient in it, and it is not sent; all ranks must return the same.  kOutcome: write Pass::tail()
  // into the tail; its bucket was not sent yet.
  virtual bool fill(std::size_t bucket) = 0;
  // Start the reduction of a bucket.  kOutcome: the all-reduce of Pass::flags().
  virtual void send(std::size_t bucket) = 0;
  // Wait for the reduction of a bucket.  kOutcome: pass its result to Pass::decode().
  virtual void wait(std::size_t bucket) = 0;
  // Pass the averages of the parameters that any rank used to the optimizer.
  virtual void deliver(const std::vector<bool>& used) = 0;
};

// Equal on every rank, except `copies`.
struct Rules {
  bool find_unused = false;  // parameters may lack a gradient, different ones in each pass
  bool learn = false;        // all passes are alike; the first shows how often each gradient arrives
  bool fill_all = false;     // call Actions::fill for every bucket, not only if gradients may be missing
  std::uint32_t copies = 1;  // copies of the model whose gradients this process adds up
};

enum class End : int {
  kNothing = 0,  // no gradient arrived: the expected pass may still come
  kWell = 1,     // the averages are delivered
  kTrouble = 2,  // on some rank gradients are missing, or the ranks are at different steps
};

// Not thread-safe.  Exceptions of Actions leave the pass unchanged; close() ends it.
class Pass {
 public:
  // buckets: the members of each; together they are the indices 0 .. n-1, each once.
  // expected: how often each parameter's gradient arrives in a pass; 0: never.
  Pass(Rules rules, std::span<const std::vector<std::uint32_t>> buckets, std::vector<std::uint32_t> expected);

  // Change buckets and expectations; ends the pass.
  void rebuild(std::span<const std::vector<std::uint32_t>> buckets, std::vector<std::uint32_t> expected);

  // Whether the outcome has a separate message; otherwise it is in the tail of the last bucket.
  bool separate() const { return separate_ || learning_ || rules_.find_unused; }
  void set_separate(bool separate) { separate_ = separate; }

  // -- forward passes

  // A forward pass whose backward pass will be reduced.
  // counts: every rank runs it.  copies: number of copies of the model that took part.
  void expect(bool counts, std::uint32_t copies);
  // A forward pass whose backward pass stays local, unless it is combined with one that is reduced.
  void ignore() { readiness_.disarm(); }

  // -- gradients

  void open() { readiness_.open(); }
  Mark mark(std::uint32_t parameter) { return readiness_.mark(parameter); }
  // The first gradient has arrived.  unreached: parameters without a gradient in this pass.
  void begin(Actions& actions, std::span<const std::uint32_t> unreached);
  // Send the buckets that are ready, in the order of their index.
  void launch(Actions& actions) { launch(actions, readiness_.ready()); }

  // -- the end

  // Send the remaining buckets, wait for all, and determine whether all ranks' passes succeeded.
  // interrupted: an exception ended this rank's pass.  shadow: this rank has no batch and contributes zeros.
  End finish(Actions& actions, bool interrupted, bool shadow);
  // For Actions::fill and send: this rank's report of the pass.
  // present: the parameters that have a gradient from earlier passes.
  Tail tail() const { return encode_tail(report()); }
  std::vector<std::uint8_t> flags(const std::vector<bool>& present) const;
  // For Actions::wait: the combined reports of all ranks.
  void decode(const Tail& mean, double epsilon) { outcome_ = {decode_tail(mean, epsilon), used_}; }
  void decode(std::span<const std::uint8_t> flags) { outcome_ = decode_flags(flags); }
  // Reset the pass and its expectations.
  void close();

  // After the first successful pass, once: the parameters in order of arrival of their gradients, then the
  // others in reverse order of registration.
  std::optional<std::vector<std::uint32_t>> take_order();

  bool opened() const { return readiness_.opened(); }
  bool gaps() const { return gaps_; }               // some gradients may be missing
  std::uint64_t number() const { return number_; }  // number of reduced passes
  Report report() const { return {trouble_, forwards_ > 0 ? forwards_ - 1 : 0}; }
  const std::vector<std::uint32_t>& expected() const { return expected_; }
  const Readiness& readiness() const { return readiness_; }
  // Parameters with expected gradients that have not arrived, ascending.
  std::vector<std::uint32_t> missing() const;

 private:
  void launch(Actions& actions, std::size_t end);
  void learn();

  Rules rules_;
  std::vector<std::uint32_t> expected_;  // by parameter
  std::vector<bool> used_;               // by parameter: has a gradient on some rank, if all passes are alike
  std::size_t buckets_;
  Readiness readiness_;
  bool separate_ = false;
  bool learning_;
  bool order_is_known_ = false;
  std::optional<std::vector<std::uint32_t>> order_;
  std::uint64_t number_ = 0;

  // of the expected or current pass
  std::uint32_t forwards_ = 0;  // since the last reduction
  std::uint32_t copies_ = 0;    // copies of the model that took part
  bool gaps_ = false;
  bool trouble_ = false;
  std::vector<bool> sent_;  // by launched bucket; false if no rank needs it
  Outcome outcome_;
};

}  // namespace shoal::ddp
