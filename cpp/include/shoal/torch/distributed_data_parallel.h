// Data-parallel training of a model of torch's C++ frontend.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shoal/error.h"
#include "shoal/group.h"
#include "shoal/torch/coalesced.h"
#include "shoal/torch/model.h"
#include "shoal/torch/reducer.h"

namespace shoal {
inline namespace frontend {
namespace detail {

// The module that a class of models contains: itself, or that of a holder made by TORCH_MODULE.
template <class M, class = void>
struct ContainedModule {
  using type = M;
};
template <class M>
struct ContainedModule<M, std::void_t<typename M::ContainedType>> {
  using type = typename M::ContainedType;
};

template <class T, class = void>
struct IsRange : std::false_type {};
template <class T>
struct IsRange<
    T, std::void_t<decltype(std::declval<const T&>().begin()), decltype(std::declval<const T&>().end())>>
    : std::true_type {};
template <class T, class = void>
struct IsTuple : std::false_type {};
template <class T>
struct IsTuple<T, std::void_t<decltype(std::tuple_size<T>::value)>> : std::true_type {};
template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};

// Adds the tensors with a graph in `output`, a nested structure of containers, tuples and optionals.
template <class T>
void add_tensors(const T& output, std::vector<at::Tensor>& tensors) {
  if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    const at::Tensor& tensor = output;
    if (tensor.defined() && tensor.grad_fn()) tensors.push_back(tensor);
  } else if constexpr (IsOptional<T>::value) {
    if (output) add_tensors(*output, tensors);
  } else if constexpr (IsTuple<T>::value) {
    std::apply([&](const auto&... part) { (add_tensors(part, tensors), ...); }, output);
  } else if constexpr (IsRange<T>::value && !std::is_convertible_v<const T&, std::string>) {
    for (const auto& part : output) add_tensors(part, tensors);
  }
}
// The part of a wrapper that does not depend on the class of its model.
class DataParallel {
 public:
  DataParallel(std::shared_ptr<torch::nn::Module> module, const Group& group,
               const DistributedDataParallelOptions& options)
      : module_(std::move(module)) {
    if (module_ == nullptr) throw UsageError("DistributedDataParallel needs a module, got none");
    const NamedTensors parameters = once(module_->named_parameters());
    const NamedTensors buffers = once(module_->named_buffers());
    NamedTensors trained;
    for (const auto& named : parameters)
      if (named.second.requires_grad()) trained.push_back(named);
    std::optional<UsageError> problem;
    try {  // errors are sent to the other ranks, which would otherwise wait for this one
      if (!(options.bucket_cap_mb > 0))
        throw UsageError("bucket_cap_mb must be positive, got " + number_text(options.bucket_cap_mb));
      check_trainable(*module_, trained);
      const bool sends_buffers = options.init_sync || options.broadcast_buffers;
      check_can_be_sent(group.rank(), parameters, sends_buffers ? buffers : NamedTensors());
    } catch (const UsageError& error) {
      problem = error;
    }
    if (options.init_sync) {
      check_same_model(group, describe_model(parameters, buffers, options), problem);
      std::vector<at::Tensor> all = tensors(parameters);
      for (const at::Tensor& buffer : tensors(buffers)) all.push_back(buffer);
      broadcast_coalesced(group, all);
    } else if (problem) {
      throw *problem;
    }
    const double most = std::min(options.bucket_cap_mb, 1e9) * (1 << 20);
    const ReducerOptions reducing{static_cast<std::uint64_t>(std::max(1.0, most)),
                                  options.find_unused_parameters, options.static_graph};
    std::vector<std::string> names;
    for (const auto& named : trained) names.push_back(named.first);
    reducer_ = std::make_shared<Reducer>(group, std::move(names), tensors(trained), reducing);
    reducer_->add_hooks();
    if (options.broadcast_buffers) buffers_ = tensors(buffers);
    change_detector_.emplace(*module_, group.rank());
  }

  const Group& group() const { return reducer_->group(); }

  // Whether the next forward pass runs inside a backward pass.
  bool before_forward() {
    if (reducer_->in_backward()) return true;
    reducer_->end_interrupted();
    change_detector_->check();
    reducer_->check_hooks();
    if (sync_enabled && module_->is_training()) refresh_buffers();
    return false;
  }

  void after_forward(const std::vector<at::Tensor>& outputs) {
    if (sync_enabled)
      reducer_->reduce_backward(outputs, module_->is_training());
    else
      reducer_->skip_backward(outputs);
  }

  bool sync_enabled = true;

 private:
  static std::vector<at::Tensor> tensors(const NamedTensors& named) {
    std::vector<at::Tensor> result;
    for (const auto& [name, tensor] : named) result.push_back(tensor);
    return result;
  }

  // Broadcasts rank 0's buffers, once in each step: autograd may have saved them in its first forward pass.
  void refresh_buffers() {
    if (buffers_.empty() || buffers_step_ == reducer_->passes()) return;
    if (!broadcast_ || !broadcast_->fits(buffers_)) broadcast_.emplace(group(), buffers_);
    broadcast_->run(buffers_);
    buffers_step_ = reducer_->passes();
  }

  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<Reducer> reducer_;
  std::optional<ModelChangeDetector> change_detector_;
  std::vector<at::Tensor> buffers_;
  std::optional<CoalescedBroadcast> broadcast_;
  std::optional<std::uint64_t> buffers_step_;
};

}  // namespace detail

/// Wraps a model for data-parallel training: gradients are averaged over all ranks.
///
/// Wrap the model on every rank, and construct the optimizer from its parameters.  Wrapping is collective: it
/// checks that all ranks have the same model and broadcasts rank 0's parameters and buffers.  If the loss is
/// a mean over equally large parts of a batch, training equals that of a single process with the whole batch,
/// up to rounding.  Python ranks with the same model can take part.
///
/// Gradients are averaged in buckets while backward still runs.  After `backward()`, `grad()` of a parameter
/// is the average, a view of a bucket in the group's shared memory.
///
/// A forward pass communicates only to broadcast rank 0's buffers: before the first forward of a step, in
/// training mode, with gradients enabled and without `no_sync`.  Other forward passes, for example for
/// evaluation, may run on any subset of ranks.
///
/// M: a class derived from torch::nn::Module, or a holder of one made by TORCH_MODULE.  Its parameters must
/// be on the CPU.  A wrapper cannot be copied or moved, and one thread at a time may use it.
///
/// `backward()` on an output throws UnusedParameterError on every rank if a parameter on any rank got no
/// gradient, OutOfStep if a rank skipped a backward pass, and the errors of Group::all_reduce.
template <class M>
class DistributedDataParallel {
 public:
  /// The class of the module.
  using Module = typename detail::ContainedModule<M>::type;
  static_assert(
      std::is_base_of_v<torch::nn::Module, Module>,
      "DistributedDataParallel<M>: M must be derived from torch::nn::Module, or a holder of such a class");

  /// Keeps passes local until it is destroyed; see `no_sync`.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(bool& sync_enabled)
        : sync_enabled_(sync_enabled), before_(std::exchange(sync_enabled, false)) {}
    ~NoSync() { sync_enabled_ = before_; }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    bool& sync_enabled_;
    const bool before_;
  };

  /// Throws ModelMismatch if the ranks' models differ, UsageError if there is nothing to train, a parameter
  /// or buffer cannot be sent, or another wrapper has a parameter, and OutOfSharedMemory if the buckets do
  /// not fit.  If only some ranks throw UsageError, the others throw ModelMismatch.
  DistributedDataParallel(std::shared_ptr<Module> module, const Group& group,
                          const DistributedDataParallelOptions& options = {})
      : module_(std::move(module)), inner_(module_, group, options) {}
  /// The same for a holder.
  DistributedDataParallel(const torch::nn::ModuleHolder<Module>& module, const Group& group,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(module ? module.ptr() : nullptr, group, options) {}
  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  /// Runs the model.  With gradients enabled, the backward pass through its output will be reduced.
  ///
  /// The tensors of the output are found in containers, tuples, pairs and optionals.
  template <class... Args>
  auto forward(Args&&... args) {
    if (!at::GradMode::is_enabled()) return run(std::forward<Args>(args)...);
    const bool inside = inner_.before_forward();
    auto output = run(std::forward<Args>(args)...);
    if (!inside) {
      std::vector<at::Tensor> tensors;
      detail::add_tensors(output, tensors);
      inner_.after_forward(tensors);
    }
    return output;
  }
  /// The same as `forward`.
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// A guard that keeps passes local while it lives, so that gradients accumulate on each rank.
  ///
  /// It applies to backward passes whose forward pass ran in its scope.  The first backward pass whose
  /// forward pass ran outside reduces the sum.
  NoSync no_sync() { return NoSync(inner_.sync_enabled); }

  /// Sets the module to training mode, or evaluation mode.
  void train(bool on = true) { module_->train(on); }
  /// Sets the module to evaluation mode.
  void eval() { module_->eval(); }
  /// The parameters of the module.
  std::vector<at::Tensor> parameters() const { return module_->parameters(); }
  /// The model.
  const std::shared_ptr<Module>& module() const { return module_; }
  /// The group.
  const Group& group() const { return inner_.group(); }

 private:
  template <class... Args>
  auto run(Args&&... args) {
    return module_->forward(std::forward<Args>(args)...);
  }

  std::shared_ptr<Module> module_;
  detail::DataParallel inner_;
};

template <class M>
DistributedDataParallel(std::shared_ptr<M>, const Group&) -> DistributedDataParallel<M>;
template <class M>
DistributedDataParallel(std::shared_ptr<M>, const Group&, const DistributedDataParallelOptions&)
    -> DistributedDataParallel<M>;
template <class M, class = typename M::ContainedType>
DistributedDataParallel(const M&, const Group&) -> DistributedDataParallel<M>;
template <class M, class = typename M::ContainedType>
DistributedDataParallel(const M&, const Group&, const DistributedDataParallelOptions&)
    -> DistributedDataParallel<M>;

}  // namespace frontend
}  // namespace shoal
