// The gradient reducer: src/shoal/parallel/reducer, with the same sequence of collectives.
//
// A hook on every parameter notifies the reducer when its gradient has arrived.  With the last gradient of a
// bucket the all-reduce of the bucket starts, and runs while autograd continues.  A callback at the end of
// the backward pass waits for all buckets.  The pass of the core (cpp/ddp/pass.h) decides when buckets are
// sent and whether the pass succeeded; it calls the reducer to move gradients, send buckets and wait for
// them.
//
// Autograd runs hooks in its own threads, one at a time for tensors on the CPU.  No lock is held in them.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "shoal/abi.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "shoal/torch/consistency.h"
#include "shoal/torch/gradients.h"
#include "shoal/torch/tensor.h"

namespace shoal {
inline namespace frontend {
namespace detail {

struct ReducerOptions {
  std::uint64_t max_bytes = 0;  // maximum size of a bucket
  bool find_unused = false;
  bool static_graph = false;
};

// The autograd graph of one forward pass: by parameter, whether it is reachable in it.
using Graph = std::vector<bool>;

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // names, parameters: those that require gradients, in the same order on every rank.
  Reducer(Group group, std::vector<std::string> names, std::vector<at::Tensor> parameters,
          const ReducerOptions& options)
      : group_(std::move(group)),
        names_(std::move(names)),
        parameters_(std::move(parameters)),
        static_graph_(options.static_graph),
        find_unused_(options.find_unused && !options.static_graph),
        gradients_(group_, names_, parameters_, options.max_bytes),
        full_graph_(std::make_shared<const Graph>(parameters_.size(), true)),
        flags_(group_.empty<std::uint8_t>(SHOAL_HEAD_FLAGS + parameters_.size())),
        present_(parameters_.size(), 0) {
    const std::vector<shoal_bucket> buckets = described();
    const std::vector<std::uint32_t> once(parameters_.size(), 1);
    shoal_pass* made = nullptr;
    check(shoal_pass_create(find_unused_, static_graph_, buckets.data(), buckets.size(), once.data(),
                            once.size(), &made));
    pass_.reset(made);
    for (std::size_t index = 0; index < parameters_.size(); ++index)
      index_of_[parameters_[index].unsafeGetTensorImpl()] = static_cast<std::uint32_t>(index);
  }
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;
  ~Reducer() { remove_hooks(); }

  const Group& group() const { return group_; }
  // Number of reduced passes; equal on all ranks.
  std::uint64_t passes() const { return state().number; }

  // -- hooks on the parameters

  // Registers the hooks.  Call it once.
  void add_hooks() {
    for (std::uint32_t index = 0; index < parameters_.size(); ++index) {
      std::unique_ptr<Before> before = take_hook(parameters_[index]);
      // A hook of a reducer that is destroyed, or whose group is closed, is not needed any more.
      while (auto* old = dynamic_cast<GradientHook*>(before.get())) before = old->release();
      torch::autograd::impl::set_post_acc_grad_hooks(
          parameters_[index], std::make_unique<GradientHook>(weak_from_this(), index, std::move(before)));
    }
  }

  // The group of the live reducer that has a hook on a parameter, if it is open.
  static std::optional<Group> owner_of(const at::Tensor& parameter) {
    const auto* hook = dynamic_cast<const GradientHook*>(hook_of(parameter).get());
    const std::shared_ptr<Reducer> reducer = hook != nullptr ? hook->reducer() : nullptr;
    if (reducer == nullptr || reducer->group_.state() != GroupState::open) return std::nullopt;
    return reducer->group_;
  }

  // Throws UsageError if the program replaced a hook: gradients would stay local without an error.
  void check_hooks() const {
    for (std::size_t index = 0; index < parameters_.size(); ++index)
      if (!has_hook(index))
        throw UsageError("the hook of parameter '" + names_[index] + "' on rank " +
                         std::to_string(group_.rank()) +
                         " was replaced after the model was wrapped in DistributedDataParallel; set a "
                         "post-accumulate-gradient hook before wrapping, which keeps it");
  }

  // -- called around a forward pass

  // Whether a backward pass with reduction is running (checkpointing runs forward inside).
  bool in_backward() const {
    return state().opened != 0 && torch::autograd::get_current_graph_task_id() != -1;
  }

  // Finishes, together with the other ranks, a pass that an exception interrupted on this rank.  The others
  // throw UnusedParameterError.  Gradients in the buckets are dropped: reductions may have overwritten them.
  void end_interrupted() {
    if (state().opened == 0) return;
    finish(true);
    gradients_.clear();
  }

  // Reduces the backward pass through these outputs.  counts: every rank runs this forward pass.
  void reduce_backward(const std::vector<at::Tensor>& outputs, bool counts) {
    shoal_pass_expect(pass_.get(), counts);
    const std::shared_ptr<const Graph> graph = graph_of(outputs);
    for (const at::Tensor& output : outputs)
      output.register_hook([owner = weak_from_this(), graph](const at::Tensor&) {
        if (const std::shared_ptr<Reducer> reducer = owner.lock()) reducer->enter(graph);
      });
  }

  // Does not reduce a backward pass through these outputs alone.
  void skip_backward(const std::vector<at::Tensor>& outputs) {
    shoal_pass_ignore(pass_.get());
    if (!find_unused_) return;
    // It may be part of a backward pass that is reduced: the graph lives as long as the outputs.
    const std::shared_ptr<const Graph> graph = graph_of(outputs);
    for (const at::Tensor& output : outputs) output.register_hook([graph](const at::Tensor&) {});
  }

 private:
  using Before = torch::autograd::PostAccumulateGradHook;

  // The hook of a parameter.  It owns the one that was there, and runs it first: what is sent must not
  // change.
  class GradientHook final : public Before {
   public:
    GradientHook(std::weak_ptr<Reducer> owner, std::uint32_t index, std::unique_ptr<Before> before)
        : owner_(std::move(owner)), index_(index), before_(std::move(before)) {}
    void operator()(const at::Tensor& parameter) override {
      if (before_ != nullptr) (*before_)(parameter);
      if (const std::shared_ptr<Reducer> reducer = owner_.lock()) reducer->on_gradient(index_);
    }
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
      if (owner_.expired()) {
        if (before_ != nullptr) before_->compiled_args(args);
        return;
      }
      throw UsageError(
          "a backward pass of a DistributedDataParallel of C++ cannot run in compiled autograd, which "
          "does not call its hooks: gradients would not be averaged; run backward() without it");
    }
    void apply_with_saved(at::Tensor& parameter,
                          torch::dynamo::autograd::SwapSavedVariables& saved) override {
      if (before_ != nullptr) before_->apply_with_saved(parameter, saved);
    }
    std::shared_ptr<Reducer> reducer() const { return owner_.lock(); }
    bool is_of(const Reducer& reducer) const {
      return !owner_.owner_before(reducer.weak_from_this()) && !reducer.weak_from_this().owner_before(owner_);
    }
    std::unique_ptr<Before> release() { return std::move(before_); }

   private:
    std::weak_ptr<Reducer> owner_;
    std::uint32_t index_;
    std::unique_ptr<Before> before_;
  };

  static std::unique_ptr<Before>& hook_of(const at::Tensor& parameter) {
    return torch::autograd::impl::post_acc_grad_hooks(parameter);
  }
  static std::unique_ptr<Before> take_hook(const at::Tensor& parameter) {
    return std::move(hook_of(parameter));
  }
  bool has_hook(std::size_t index) const {
    const auto* hook = dynamic_cast<const GradientHook*>(hook_of(parameters_[index]).get());
    return hook != nullptr && hook->is_of(*this);
  }
  void remove_hooks() {
    for (std::size_t index = 0; index < parameters_.size(); ++index)
      if (has_hook(index)) {
        const std::unique_ptr<Before> own = take_hook(parameters_[index]);
        hook_of(parameters_[index]) = static_cast<GradientHook&>(*own).release();
      }
  }

  // -- the graph of a forward pass

  // The graph of a forward pass with these outputs.
  std::shared_ptr<const Graph> graph_of(const std::vector<at::Tensor>& outputs) {
    if (!find_unused_ || outputs.empty()) return full_graph_;
    const auto graph = std::make_shared<const Graph>(reachable(outputs));
    graphs_.erase(
        std::remove_if(graphs_.begin(), graphs_.end(), [](const auto& old) { return old.expired(); }),
        graphs_.end());
    graphs_.push_back(graph);
    return graph;
  }

  Graph reachable(const std::vector<at::Tensor>& outputs) const {
    using torch::autograd::Node;
    Graph found(parameters_.size(), false);
    std::unordered_set<const Node*> seen;
    std::vector<const Node*> pending;
    const auto visit = [&](const Node* node) {
      if (node != nullptr && seen.insert(node).second) pending.push_back(node);
    };
    for (const at::Tensor& output : outputs) visit(output.grad_fn().get());
    while (!pending.empty()) {
      const Node* node = pending.back();
      pending.pop_back();
      for (const torch::autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
      if (node->num_outputs() > 0) continue;
      if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node))
        if (const auto index = index_of_.find(leaf->variable.unsafeGetTensorImpl()); index != index_of_.end())
          found[index->second] = true;
    }
    return found;
  }

  // The parameters that no graph reaches that backward entered or may still enter.
  std::vector<std::uint32_t> unreached() const {
    std::vector<std::uint32_t> result;
    if (!find_unused_ || entered_.empty()) return result;
    std::vector<std::shared_ptr<const Graph>> graphs = entered_;
    for (const std::weak_ptr<const Graph>& graph : graphs_)
      if (std::shared_ptr<const Graph> alive = graph.lock()) graphs.push_back(std::move(alive));
    for (std::uint32_t index = 0; index < parameters_.size(); ++index)
      if (std::none_of(graphs.begin(), graphs.end(), [&](const auto& graph) { return (*graph)[index]; }))
        result.push_back(index);
    return result;
  }

  // -- called by autograd

  // Opens a pass before its first gradient, or continues it in another graph.
  void enter(const std::shared_ptr<const Graph>& graph) {
    if (state().opened != 0 && end_of_pass_.expired())
      end_interrupted();  // no forward pass has done it since
    entered_.push_back(graph);
    if (state().opened != 0) return;
    preserve_referenced();
    shoal_pass_open(pass_.get());
    queue_finish();
  }

  // The gradient of a parameter has arrived.
  void on_gradient(std::uint32_t index) {
    const bool opened = state().opened != 0;
    const std::int32_t mark = shoal_pass_mark(pass_.get(), index);
    if (mark == SHOAL_MARK_IGNORED) return;
    if (!gradients_.take(index, opened)) {
      preserve_referenced();
      gradients_.copy_to_bucket(index);
    }
    if (mark == SHOAL_MARK_ARRIVED) return;
    if (mark == SHOAL_MARK_UNEXPECTED) throw UsageError(unexpected(index));
    queue_finish();  // if no hook of an output has done it
    if (state().arrived == 1) begin();
    run([&](const shoal_actions* actions) { return shoal_pass_launch(pass_.get(), actions); });
  }

  void begin() {
    preserve_referenced();
    if (state().separate != 0)
      for (std::size_t index = 0; index < present_.size(); ++index)
        present_[index] = gradients_.present(index);
    const std::vector<std::uint32_t> without = unreached();
    run([&](const shoal_actions* actions) {
      return shoal_pass_begin(pass_.get(), actions, without.data(), without.size());
    });
  }

  // Preserves gradients of earlier passes that the program references; once in each pass.
  void preserve_referenced() {
    if (!std::exchange(references_checked_, true)) gradients_.preserve_referenced();
  }

  // Runs finish() at the end of backward.  An exception in backward destroys the callback and its token.
  void queue_finish() {
    if (!end_of_pass_.expired()) return;
    auto token = std::make_shared<char>();
    torch::autograd::Engine::get_default_engine().queue_callback(
        [self = shared_from_this(), token] { self->finish(false); });
    end_of_pass_ = token;
  }

  std::string unexpected(std::uint32_t index) const {
    const std::string where =
        "the gradient of '" + names_[index] + "' on rank " + std::to_string(group_.rank());
    if (static_graph_)
      return where +
             " arrived more often than in the first backward pass, but static_graph requires all passes "
             "to be alike; omit that option";
    if (find_unused_)
      return where +
             " arrived twice, or although no output of the forward pass depends on it: it is used outside of "
             "forward, or in a reentrant backward pass, whose graph is not known; use it in forward, or "
             "static_graph";
    return where +
           " arrived twice in one backward pass, because the parameter is used in several reentrant backward "
           "passes; use static_graph";
  }

  // -- called by the pass

  // Calls a function of the pass with the functions below, and throws the exception that one of them had.
  template <class F>
  void run(F call) {
    const shoal_actions actions{
        this,
        [](void* self, std::size_t bucket, std::int32_t* send) {
          return of(self).attempt([&](Reducer& reducer) { *send = reducer.fill(bucket); });
        },
        [](void* self, std::size_t bucket) {
          return of(self).attempt([&](Reducer& reducer) { reducer.send(bucket); });
        },
        [](void* self, std::size_t bucket) {
          return of(self).attempt([&](Reducer& reducer) { reducer.wait(bucket); });
        },
        [](void* self, const std::uint8_t* used) {
          return of(self).attempt([&](Reducer& reducer) { reducer.deliver(used); });
        }};
    shoal_error* error = call(&actions);
    if (const std::exception_ptr failure = std::exchange(failure_, nullptr)) {
      shoal_error_free(error);
      std::rethrow_exception(failure);
    }
    check(error);
  }
  static Reducer& of(void* self) { return *static_cast<Reducer*>(self); }
  template <class F>
  std::int32_t attempt(F action) noexcept {
    try {
      action(*this);
      return 1;
    } catch (...) {
      failure_ = std::current_exception();
      return 0;
    }
  }

  // Completes the gradients in a bucket before it is sent; false: it is not sent.
  bool fill(std::size_t bucket) {
    if (bucket == SHOAL_OUTCOME) {
      write_tail();
    } else if (state().gaps != 0) {
      std::vector<std::uint32_t> counts(parameters_.size());
      shoal_pass_counts(pass_.get(), counts.data());
      gradients_.fill_gaps(bucket, counts);
    }
    return true;
  }

  // Starts the reduction of a bucket, or the exchange of the outcome.
  void send(std::size_t bucket) {
    if (bucket == SHOAL_OUTCOME) {
      check(shoal_pass_flags(pass_.get(), present_.data(), flags_.data()));
      outcome_ = group_.all_reduce(flags_, max);
    } else {
      sent_.resize(gradients_.buckets().size());
      sent_[bucket] = group_.all_reduce(gradients_.buckets()[bucket].flat, avg);
    }
  }

  void wait(std::size_t bucket) {
    if (bucket != SHOAL_OUTCOME) {
      sent_[bucket]->wait();
    } else if (state().separate != 0) {
      outcome_->wait();
      check(shoal_pass_decode_flags(pass_.get(), flags_.data()));
    } else {
      read_tail();
    }
  }

  void deliver(const std::uint8_t* used) { gradients_.deliver(used, state().gaps != 0); }

  // Writes this rank's report into the tail.  Zeros report success.
  void write_tail() {
    double own[SHOAL_TAIL_ELEMENTS];
    shoal_pass_tail(pass_.get(), own);
    const at::NoGradGuard no_grad;
    at::Tensor(gradients_.tail())
        .copy_(at::from_blob(own, {SHOAL_TAIL_ELEMENTS}, at::TensorOptions(at::kDouble)));
  }
  void read_tail() {
    double mean[SHOAL_TAIL_ELEMENTS];
    const at::NoGradGuard no_grad;
    at::from_blob(mean, {SHOAL_TAIL_ELEMENTS}, at::TensorOptions(at::kDouble)).copy_(gradients_.tail());
    check(shoal_pass_decode_tail(pass_.get(), mean, epsilon(gradients_.tail().scalar_type())));
    if (std::any_of(std::begin(mean), std::end(mean), [](double part) { return part != 0; }))
      at::Tensor(gradients_.tail()).zero_();
  }
  // The distance from 1 to the next number.
  static double epsilon(at::ScalarType dtype) {
    switch (dtype) {
      case at::kDouble:
        return std::numeric_limits<double>::epsilon();
      case at::kFloat:
        return std::numeric_limits<float>::epsilon();
      case at::kHalf:
        return 1.0 / 1024;
      case at::kBFloat16:
        return 1.0 / 128;
      case at::kFloat8_e4m3fn:
      case at::kFloat8_e4m3fnuz:
        return 1.0 / 8;
      default:
        return 1.0 / 4;
    }
  }

  // -- the end of a pass

  // Waits for all buckets; throws unless the pass succeeded on every rank.
  void finish(bool interrupted) {
    end_of_pass_.reset();
    std::int32_t end = SHOAL_END_TROUBLE;
    try {
      run([&](const shoal_actions* actions) {
        return shoal_pass_finish(pass_.get(), actions, interrupted, &end);
      });
      if (end == SHOAL_END_NOTHING) {  // only gradients of inputs were computed; the pass may still come
        entered_.clear();
        references_checked_ = false;
        return;
      }
      if (end == SHOAL_END_TROUBLE)
        raise_failure(interrupted);
      else
        adopt_order();
    } catch (...) {
      close_pass();
      throw;
    }
    close_pass();
  }

  void close_pass() {
    graphs_.erase(std::remove_if(graphs_.begin(), graphs_.end(),
                                 [&](const std::weak_ptr<const Graph>& graph) {
                                   const auto alive = graph.lock();
                                   return !alive || std::count(entered_.begin(), entered_.end(), alive) > 0;
                                 }),
                  graphs_.end());
    entered_.clear();
    std::fill(present_.begin(), present_.end(), std::uint8_t{0});
    references_checked_ = false;
    sent_.clear();
    outcome_.reset();
    shoal_pass_close(pass_.get());
  }

  // Throws the error of a pass, except on ranks where an exception ended it: these have thrown it already,
  // and stay in step if the program catches it and skips the batch.  Collective.
  void raise_failure(bool interrupted) const {
    const std::size_t count = parameters_.size();
    std::vector<std::uint32_t> missing(count);
    std::size_t missing_count = 0;
    check(shoal_pass_missing(pass_.get(), missing.data(), &missing_count));
    std::vector<std::int32_t> own(count + 2, 0);
    for (std::size_t i = 0; i < missing_count; ++i) own[missing[i]] = 1;
    own[count] = interrupted;
    own[count + 1] = static_cast<std::int32_t>(state().extra);
    const std::vector<Array<std::int32_t>> rows = group_.all_gather(Array<std::int32_t>(own)).wait();
    if (interrupted) return;
    const std::string seen = "(seen by rank " + std::to_string(group_.rank()) + "):\n  ";
    const std::string undone = "The gradients of this step are undefined; the group is still usable.";
    std::set<std::int32_t> extras;
    bool any_interrupted = false;
    std::vector<std::string> lines;
    for (const Array<std::int32_t>& row : rows) {
      extras.insert(row[count + 1]);
      any_interrupted = any_interrupted || row[count] != 0;
    }
    if (extras.size() > 1 && !any_interrupted) {
      for (std::size_t rank = 0; rank < rows.size(); ++rank)
        lines.push_back("rank " + std::to_string(rank) + ": " + std::to_string(rows[rank][count + 1] + 1));
      throw OutOfStep(
          "the ranks ran different numbers of forward passes in training mode before this backward pass " +
          seen + joined(lines, "\n  ") +
          "\nA rank with more of them skipped a backward pass.  Run a backward pass for every forward "
          "pass on all ranks, or run the others under torch::NoGradGuard or in eval().  " +
          undone);
    }
    for (std::size_t rank = 0; rank < rows.size(); ++rank) {
      std::vector<std::string> without;
      for (std::size_t index = 0; index < count; ++index)
        if (rows[rank][index] != 0)
          without.push_back("'" + names_[index] + "'" +
                            (parameters_[index].requires_grad() ? "" : " (frozen after wrapping)"));
      const std::string prefix = "rank " + std::to_string(rank) + ": ";
      if (rows[rank][count] != 0)
        lines.push_back(prefix + "an exception ended backward before " + listed(without));
      else if (!without.empty())
        lines.push_back(prefix + listed(without));
    }
    throw UnusedParameterError(
        "backward ended without gradients for some parameters " + seen + joined(lines, "\n  ") +
        "\nTheir buckets cannot become complete.  Use every parameter in the loss on every rank, wrap with "
        "find_unused_parameters=true, or freeze unused parameters (set_requires_grad(false)) before "
        "wrapping the model.  " +
        undone);
  }

  static std::string listed(const std::vector<std::string>& names) {
    constexpr std::size_t kMostShown = 20;
    if (names.size() <= kMostShown) return joined(names, ", ");
    return joined({names.begin(), names.begin() + kMostShown}, ", ") + " and " +
           std::to_string(names.size() - kMostShown) + " more";
  }

  // After the first successful pass, rebuilds the buckets in rank 0's order of arrival.
  void adopt_order() {
    const std::size_t count = parameters_.size();
    std::vector<std::uint32_t> order(count), expected(count);
    std::int32_t known = 0;
    check(shoal_pass_take_order(pass_.get(), order.data(), &known));
    if (known == 0) return;
    shoal_pass_expected(pass_.get(), expected.data());
    std::vector<std::int64_t> shown(order.begin(), order.end());
    shown.insert(shown.end(), expected.begin(), expected.end());
    shown.push_back(1);  // copies of the model in this process
    group_.broadcast(Array<std::int64_t>(shown), 0).wait();
    order.assign(shown.begin(), shown.begin() + static_cast<std::ptrdiff_t>(count));
    sent_.clear();  // it references the old buckets
    gradients_.arrange(order);
    const std::vector<shoal_bucket> buckets = described();
    check(shoal_pass_rebuild(pass_.get(), buckets.data(), buckets.size(), expected.data()));
  }

  std::vector<shoal_bucket> described() const {
    std::vector<shoal_bucket> result;
    for (const Bucket& bucket : gradients_.buckets())
      result.push_back({bucket.members.data(), nullptr, bucket.members.size(), 0});
    return result;
  }

  shoal_pass_state state() const { return shoal_pass_describe(pass_.get()); }

  struct FreePass {
    void operator()(shoal_pass* pass) const { shoal_pass_free(pass); }
  };

  const Group group_;
  const std::vector<std::string> names_;
  const std::vector<at::Tensor> parameters_;
  const bool static_graph_, find_unused_;
  Gradients gradients_;
  std::unique_ptr<shoal_pass, FreePass> pass_;
  std::unordered_map<const c10::TensorImpl*, std::uint32_t> index_of_;
  std::shared_ptr<const Graph> full_graph_;  // in which every parameter may be reachable
  // The graphs of live outputs of forward passes that had no backward pass yet.
  std::vector<std::weak_ptr<const Graph>> graphs_;
  std::weak_ptr<char> end_of_pass_;  // the token of the callback at the end of backward
  std::exception_ptr failure_;       // of a function that the pass called
  Array<std::uint8_t> flags_;        // in registered memory

  // of the pass
  std::vector<std::shared_ptr<const Graph>> entered_;  // the graphs that backward has entered
  std::vector<std::uint8_t> present_;  // by parameter: had a gradient before a bucket was sent
  bool references_checked_ = false;
  std::vector<std::optional<Future<at::Tensor>>> sent_;  // the started reductions, by bucket
  std::optional<Future<Array<std::uint8_t>>> outcome_;
};

}  // namespace detail
}  // namespace frontend
}  // namespace shoal
