// The parameters and buffers of a model, and the checks of a wrapper:
// src/shoal/parallel/ddp/{module_tensors,model_check}.py, with the same messages.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "shoal/error.h"
#include "shoal/group.h"
#include "shoal/torch/coalesced.h"
#include "shoal/torch/consistency.h"
#include "shoal/torch/reducer.h"

namespace shoal {
inline namespace frontend {

/// Options of DistributedDataParallel; all ranks must pass the same.
struct DistributedDataParallelOptions {
  /// Broadcast rank 0's buffers (running statistics, for example) in every step.
  bool broadcast_buffers = true;
  /// Check now that all ranks have the same model, and broadcast rank 0's parameters and buffers.  If false,
  /// the caller must ensure both.
  bool init_sync = true;
  /// Maximum size of a bucket in MiB.  Smaller buckets start communication earlier, larger ones are more
  /// efficient.
  double bucket_cap_mb = 25;
  /// Allow parameters without a gradient, different ones in each pass and on each rank.
  bool find_unused_parameters = false;
  /// All passes use the same parameters equally often, as found in the first one.  Allows parameters that are
  /// never used.
  bool static_graph = false;
};

namespace detail {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Each tensor once, with its first name.
inline NamedTensors once(const torch::OrderedDict<std::string, at::Tensor>& named) {
  NamedTensors result;
  std::unordered_set<const void*> seen;
  for (const auto& item : named)
    if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second)
      result.emplace_back(item.key(), item.value());
  return result;
}

inline std::string list_text(at::IntArrayRef numbers) {
  std::vector<std::string> texts;
  for (const std::int64_t number : numbers) texts.push_back(std::to_string(number));
  return "[" + joined(texts, ", ") + "]";
}

// The dtype, shape, strides and kind of a tensor.
inline std::string describe_tensor(const at::Tensor& tensor) {
  std::string text = dtype_name(tensor.scalar_type());
  if (tensor.is_nested()) return text + ", nested";
  text += " " + list_text(tensor.sizes());
  if (tensor.layout() != at::kStrided) return text + " with another layout";
  if (tensor.is_meta()) text += " on the meta device";
  if (tensor.is_conj() || tensor.is_neg()) text += ", conjugated or negated lazily";
  return tensor.is_contiguous() ? text : text + " with strides " + list_text(tensor.strides());
}

inline std::string describe_parameter(const at::Tensor& parameter) {
  return describe_tensor(parameter) + (parameter.requires_grad() ? ", requires grad" : ", frozen");
}

inline Items describe_model(const NamedTensors& parameters, const NamedTensors& buffers,
                            const DistributedDataParallelOptions& options) {
  const auto flag = [](bool value) { return std::string(value ? "True" : "False"); };
  Items items;
  for (const auto& [name, tensor] : parameters)
    items.emplace_back("parameter '" + name + "'", describe_parameter(tensor));
  for (const auto& [name, tensor] : buffers)
    items.emplace_back("buffer '" + name + "'", describe_tensor(tensor));
  // All options of Python; those without a field here have Python's default.
  const Items settings{{"dim", "0"},
                       {"broadcast_buffers", flag(options.broadcast_buffers)},
                       {"bucket_cap_mb", number_text(options.bucket_cap_mb)},
                       {"find_unused_parameters", flag(options.find_unused_parameters)},
                       {"gradient_as_bucket_view", flag(true)},
                       {"static_graph", flag(options.static_graph)},
                       {"delay_all_reduce_named_params", "[]"},
                       {"mixed_precision", "None"},
                       {"skip_all_reduce_unused_params", flag(false)},
                       {"params_and_buffers_to_ignore", "[]"}};
  for (const auto& [name, text] : settings) items.emplace_back("option " + name, text);
  return items;
}

// Throws ModelMismatch on every rank unless all ranks have equal models, UsageError on ranks with a problem.
// problem: the reason why this rank cannot wrap its model.  Collective.
inline void check_same_model(const Group& group, Items description,
                             const std::optional<UsageError>& problem) {
  const std::string fitness = problem ? std::string("invalid (") + problem->what() + ")" : "valid";
  description.insert(description.begin(), {"the model", fitness});
  try {
    check_same(group, "wrapped models that differ", description);
  } catch (const ModelMismatch&) {
    if (!problem) throw;
  }
  if (problem) throw *problem;
}

// Throws UsageError, with reasons, unless all tensors can be sent and overwritten.
inline void check_can_be_sent(int rank, const NamedTensors& parameters, const NamedTensors& buffers) {
  constexpr std::size_t kMostShown = 10;
  std::vector<std::string> lines;
  const auto look = [&](const char* kind, const NamedTensors& tensors) {
    for (const auto& [name, tensor] : tensors)
      if (const auto reason = broadcast_obstacle(tensor))
        lines.push_back("  " + std::string(kind) + " '" + name + "': " + *reason);
  };
  look("parameter", parameters);
  look("buffer", buffers);
  if (lines.empty()) return;
  const std::size_t more = lines.size() - std::min(lines.size(), kMostShown);
  lines.resize(lines.size() - more);
  if (more > 0) lines.push_back("  and " + std::to_string(more) + " more");
  throw UsageError("DistributedDataParallel cannot send these tensors of the module on rank " +
                   std::to_string(rank) + " to other ranks:\n" + joined(lines, "\n") +
                   "\nMake them dense tensors on the CPU that have values");
}

// Throws UsageError if no parameter requires a gradient, or another wrapper reduces one.
inline void check_trainable(const torch::nn::Module& module, const NamedTensors& trained) {
  if (trained.empty())
    throw UsageError("no parameter of " + module.name() +
                     " requires a gradient: there is nothing to train; use the module without a wrapper");
  for (const auto& [name, parameter] : trained)
    if (const std::optional<Group> group = Reducer::owner_of(parameter))
      throw UsageError(
          "parameter '" + name + "' belongs to a DistributedDataParallel already, over group '" +
          group->name() +
          "': two wrappers would reduce the same gradients; wrap each parameter once, or destroy "
          "the other wrapper first");
}

// Detects changes of a model after it was wrapped, which each rank would train separately.
class ModelChangeDetector {
 public:
  ModelChangeDetector(const torch::nn::Module& module, int rank)
      : module_(module), named_(module.named_parameters()), rank_(rank) {
    for (const auto& item : named_)
      kinds_.emplace_back(item.value().scalar_type(), item.value().requires_grad());
  }

  // Throws UsageError, naming the parameter.
  void check() const {
    const std::vector<at::Tensor> now = module_.parameters();
    if (!std::equal(now.begin(), now.end(), named_.begin(), named_.end(),
                    [](const at::Tensor& own, const auto& item) { return own.is_same(item.value()); }))
      fail_if_other_parameters();
    for (std::size_t i = 0; i < kinds_.size(); ++i) {
      const at::Tensor& parameter = named_[i].value();
      const auto [dtype, trained] = kinds_[i];
      if (parameter.scalar_type() != dtype)
        fail(named_[i].key(), "was torch." + dtype_name(dtype) + " when it was wrapped and is torch." +
                                  dtype_name(parameter.scalar_type()) + " now");
      if (!trained && parameter.requires_grad())
        fail(named_[i].key(), "was frozen when it was wrapped and requires a gradient now");
    }
  }

 private:
  void fail_if_other_parameters() const {
    const auto now = module_.named_parameters();
    for (const auto& item : named_) {
      const at::Tensor* const found = now.find(item.key());
      if (found == nullptr) fail(item.key(), "was removed from the module");
      if (!found->is_same(item.value())) fail(item.key(), "was replaced");
    }
    for (const auto& item : now)
      if (!named_.contains(item.key())) fail(item.key(), "was added");
  }

  [[noreturn]] void fail(const std::string& name, const std::string& what) const {
    throw UsageError("the model on rank " + std::to_string(rank_) +
                     " changed after it was wrapped in DistributedDataParallel: parameter '" + name + "' " +
                     what + "; wrap the module again after such a change");
  }

  const torch::nn::Module& module_;  // which the wrapper keeps
  torch::OrderedDict<std::string, at::Tensor> named_;
  std::vector<std::pair<at::ScalarType, bool>> kinds_;
  int rank_;
};

}  // namespace detail
}  // namespace frontend
}  // namespace shoal
