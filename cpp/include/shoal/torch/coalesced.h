// Coalesced broadcasts: src/shoal/parallel/coalesced.py, with the same messages between ranks.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shoal/group.h"
#include "shoal/torch/tensor.h"

namespace shoal {
inline namespace frontend {
namespace detail {

// Alignment of a tensor in a message, and of a gradient in its bucket, in bytes: kAlignment of the core.
inline constexpr std::int64_t kAlignment = 64;

inline std::int64_t packed_size(const at::Tensor& tensor) {
  return (static_cast<std::int64_t>(tensor.nbytes()) + kAlignment - 1) / kAlignment * kAlignment;
}

// Why a tensor cannot be overwritten with bytes of another rank; no value: it can.
inline std::optional<std::string> broadcast_obstacle(const at::Tensor& tensor) {
  if (tensor.is_nested()) return "it is a nested tensor";
  if (tensor.layout() != at::kStrided) return "it is not dense";
  if (tensor.is_quantized()) return "it is quantised";
  if (tensor.is_meta()) return "it is on the meta device, which has no values";
  if (!tensor.device().is_cpu())
    return "it is on " + tensor.device().str() + ", and C++ programs train on the CPU";
  return std::nullopt;
}

// A writable view that has each element in memory once, without lazy conjugation.
inline at::Tensor writable_elements(at::Tensor tensor) {
  tensor = tensor.detach();
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) tensor = tensor.narrow(dim, 0, 1);
  if (tensor.is_neg()) tensor = at::_neg_view(tensor);
  return tensor.is_conj() ? tensor.conj() : tensor;
}

// A broadcast of several tensors through one buffer in registered memory.
class CoalescedBroadcast {
 public:
  // like: at least one tensor; equal shapes and dtypes on all ranks.
  CoalescedBroadcast(const Group& group, const std::vector<at::Tensor>& like) : group_(group) {
    std::int64_t end = 0;
    for (const at::Tensor& tensor : like) end += packed_size(writable_elements(tensor));
    memory_ = empty(group, {end}, at::TensorOptions(at::kByte)).zero_();  // the gaps are sent too
    auto* place = static_cast<char*>(memory_.data_ptr());
    for (const at::Tensor& tensor : like) {
      const at::Tensor elements = writable_elements(tensor);
      views_.push_back(at::from_blob(place, elements.sizes(), at::TensorOptions(elements.scalar_type())));
      place += packed_size(elements);
    }
  }

  // Whether the tensors still have the shapes and dtypes of `like`.
  bool fits(const std::vector<at::Tensor>& tensors) const {
    for (std::size_t i = 0; i < tensors.size(); ++i)
      if (tensors[i].scalar_type() != views_[i].scalar_type() ||
          writable_elements(tensors[i]).sizes() != views_[i].sizes())
        return false;
    return true;
  }

  // Overwrites the tensors with those of rank 0.  Collective.
  void run(const std::vector<at::Tensor>& tensors) const {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; group_.rank() == 0 && i < views_.size(); ++i)
      at::Tensor(views_[i]).copy_(writable_elements(tensors[i]));
    group_.broadcast(memory_, 0).wait();
    for (std::size_t i = 0; group_.rank() != 0 && i < views_.size(); ++i)
      writable_elements(tensors[i]).copy_(views_[i]);
  }

 private:
  Group group_;
  at::Tensor memory_;
  std::vector<at::Tensor> views_;
};

// Overwrites the tensors with those of rank 0, in few messages.  Collective.
inline void broadcast_coalesced(const Group& group, const std::vector<at::Tensor>& tensors) {
  constexpr std::int64_t kMessageBytes = 25 << 20;  // a larger tensor has a message of its own
  std::vector<at::Tensor> message;
  std::int64_t bytes = 0;
  const auto send = [&] {
    if (!message.empty()) CoalescedBroadcast(group, message).run(message);
    message.clear();
    bytes = 0;
  };
  for (const at::Tensor& tensor : tensors) {
    if (!message.empty() && bytes + packed_size(tensor) > kMessageBytes) send();
    message.push_back(tensor);
    bytes += packed_size(tensor);
  }
  send();
}

}  // namespace detail
}  // namespace frontend
}  // namespace shoal
