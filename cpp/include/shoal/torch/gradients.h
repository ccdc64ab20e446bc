// Buckets, and moving gradients into them and averages back:
// src/shoal/parallel/reducer/{buckets,gradients}.py.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shoal/abi.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "shoal/torch/coalesced.h"
#include "shoal/torch/tensor.h"

namespace shoal {
inline namespace frontend {
namespace detail {

// Gradients that are reduced together.
struct Bucket {
  std::vector<std::uint32_t> members;  // indices of parameters, in the order in which gradients are expected
  at::Tensor flat;                     // the whole memory, also the tail; the gaps between gradients are zero
  std::vector<at::Tensor> views;       // by member: the memory of its gradient, with its shape and strides
};

// A view of `flat` at `offset` bytes with the shape of `like`, and the strides of a dense copy of it.
inline at::Tensor dense_view(const at::Tensor& flat, std::int64_t offset, const at::Tensor& like) {
  const at::Tensor dense = at::empty_like(like.detach(), at::TensorOptions(at::kMeta));
  return flat.as_strided(like.sizes(), dense.strides(),
                         offset / static_cast<std::int64_t>(flat.element_size()));
}

// The gradients of a model's parameters, and their buckets.
class Gradients {
 public:
  Gradients(const Group& group, std::vector<std::string> names, std::vector<at::Tensor> parameters,
            std::uint64_t max_bytes)
      : group_(group),
        names_(std::move(names)),
        parameters_(std::move(parameters)),
        max_bytes_(max_bytes),
        copied_(parameters_.size(), false) {
    std::vector<std::uint32_t> order;
    for (std::size_t index = parameters_.size(); index-- > 0;)
      order.push_back(static_cast<std::uint32_t>(index));
    arrange(order);
  }

  const std::vector<Bucket>& buckets() const { return buckets_; }
  // The last elements of the last bucket, for the outcome of a pass.
  const at::Tensor& tail() const { return tail_; }

  // Builds the buckets for gradients in this order, or rebuilds them and moves their contents.
  void arrange(const std::vector<std::uint32_t>& order) {
    std::vector<Bucket> built = build(order);
    const bool equal = std::equal(built.begin(), built.end(), buckets_.begin(), buckets_.end(),
                                  [](const Bucket& a, const Bucket& b) { return a.members == b.members; });
    if (!equal) {
      const at::NoGradGuard no_grad;
      const std::vector<at::Tensor> places_before = std::move(places_),
                                    gradients_before = std::move(gradients_);
      buckets_ = std::move(built);
      places_.assign(parameters_.size(), {});
      gradients_.assign(parameters_.size(), {});
      addresses_.assign(parameters_.size(), nullptr);
      for (const Bucket& bucket : buckets_) adopt(bucket);
      set_tail();
      for (std::size_t index = 0; index < places_before.size(); ++index) {
        places_[index].copy_(places_before[index]);
        if (parameters_[index].grad().is_same(gradients_before[index]))
          parameters_[index].mutable_grad() = gradients_[index];
      }
    }
    built.clear();
    references_.clear();
    for (const Bucket& bucket : buckets_) references_.push_back(bucket.flat.storage().use_count());
  }

  // -- references that the program keeps

  // Preserves gradients of earlier passes that the program references: their bucket gets new memory.
  // Called before a pass writes to the buckets.  The current gradient of a parameter is not preserved: as
  // without data parallelism, the pass accumulates into it.
  void preserve_referenced() {
    for (std::size_t number = 0; number < buckets_.size(); ++number) {
      const Bucket& bucket = buckets_[number];
      const bool aliased = bucket.flat.storage().use_count() > references_[number];
      std::vector<std::uint32_t> kept;
      for (const std::uint32_t index : bucket.members) {
        const bool referenced = gradients_[index].use_count() > 1 && !copied_[index] &&
                                !parameters_[index].grad().is_same(gradients_[index]);
        if (referenced || (aliased && !copied_[index])) kept.push_back(index);
      }
      if (!kept.empty()) renew(number, kept);
    }
  }

  // -- into the buckets

  // Puts a gradient that has arrived into its bucket.  opened: the pass had begun.
  // Returns false if references to earlier gradients must be preserved first.
  bool take(std::uint32_t index, bool opened) {
    const at::Tensor& gradient = parameters_[index].grad();
    if (gradient.is_same(gradients_[index]) && is_in_place(index, gradient)) return true;
    if (!opened) return false;
    copy_to_bucket(index);
    return true;
  }

  // Copies a gradient that autograd allocated elsewhere into its bucket.
  void copy_to_bucket(std::uint32_t index) {
    at::Tensor& gradient = parameters_[index].mutable_grad();
    if (!gradient.defined())
      throw UsageError("the gradient of '" + names_[index] + "' on rank " + std::to_string(group_.rank()) +
                       " was removed before it was reduced: a hook of the parameter must not apply gradients "
                       "during backward; call the optimizer after backward()");
    if (gradient.layout() != at::kStrided)
      throw UsageError(
          "the gradient of '" + names_[index] + "' on rank " + std::to_string(group_.rank()) +
          " is sparse, and DistributedDataParallel of C++ reduces dense gradients only; make the module "
          "with sparse(false)");
    const at::Tensor& place = places_[index];
    if (gradient.scalar_type() == place.scalar_type() && gradient.sizes() == place.sizes() &&
        gradient.strides() == place.strides() && gradient.is_non_overlapping_and_dense() &&
        !gradient.is_conj() && !gradient.is_neg()) {
      if (place.nbytes() > 0)
        std::memcpy(place.mutable_data_ptr(), gradient.const_data_ptr(), place.nbytes());
    } else {
      const at::NoGradGuard no_grad;  // backward(create_graph=true)
      places_[index].copy_(gradient.detach());
    }
    if (!copied_[index]) gradient = view(index);
  }

  // Fills a bucket with older gradients, or zeros, where none arrived in this pass.
  void fill_gaps(std::size_t number, const std::vector<std::uint32_t>& counts) {
    for (const std::uint32_t index : buckets_[number].members) {
      if (counts[index] != 0) continue;
      const at::Tensor& gradient = parameters_[index].grad();
      if (!gradient.defined())
        places_[index].zero_();
      else if (!is_in_place(index, gradient))
        copy_to_bucket(index);
    }
  }

  bool present(std::size_t index) const { return parameters_[index].grad().defined(); }

  // -- out of the buckets

  // Sets the gradients of the parameters to the averages.  used: whether any rank had a gradient; other
  // gradients are not changed.  gaps: whether a gradient did not arrive on this rank.
  void deliver(const std::uint8_t* used, bool gaps) {
    for (std::uint32_t index = 0; index < parameters_.size(); ++index) {
      if (!used[index]) continue;
      if (copied_[index]) {
        const at::NoGradGuard no_grad;
        at::Tensor& own = parameters_[index].mutable_grad();
        if (!own.defined() || own.is_conj() || own.is_neg())
          own = at::empty_like(parameters_[index].detach());
        at::Tensor(own).copy_(places_[index]);
      } else if (gaps) {
        parameters_[index].mutable_grad() = view(index);
      }
    }
  }

  // Removes gradients that are in the buckets.
  void clear() {
    for (std::size_t index = 0; index < parameters_.size(); ++index)
      if (parameters_[index].grad().is_same(gradients_[index])) parameters_[index].mutable_grad().reset();
  }

 private:
  std::vector<Bucket> build(const std::vector<std::uint32_t>& order) const {
    constexpr std::uint64_t kFirstBytes = 1 << 20;  // small, so that communication starts early
    std::vector<std::uint64_t> bytes;
    std::vector<std::uint32_t> kinds;
    std::map<at::ScalarType, std::uint32_t> kind_of;
    for (const at::Tensor& parameter : parameters_) {
      bytes.push_back(parameter.nbytes());
      const auto next = static_cast<std::uint32_t>(kind_of.size());
      kinds.push_back(kind_of.emplace(parameter.scalar_type(), next).first->second);
    }
    shoal_bucket* assigned = nullptr;
    std::size_t count = 0;
    check(shoal_assign_buckets(bytes.data(), kinds.data(), order.data(), order.size(),
                               std::min(kFirstBytes, max_bytes_), max_bytes_, &assigned, &count));
    const auto release = [count](shoal_bucket* buckets) { shoal_buckets_free(buckets, count); };
    const std::unique_ptr<shoal_bucket, decltype(release)> owner(assigned, release);
    std::vector<Bucket> buckets;
    for (std::size_t number = 0; number < count; ++number) {
      const shoal_bucket& from = assigned[number];
      const at::ScalarType dtype = parameters_[from.members[0]].scalar_type();
      std::int64_t elements = static_cast<std::int64_t>(from.bytes / c10::elementSize(dtype));
      if (number + 1 == count) elements += SHOAL_TAIL_ELEMENTS;
      Bucket& bucket = buckets.emplace_back();
      bucket.members.assign(from.members, from.members + from.member_count);
      bucket.flat = empty(group_, {elements}, at::TensorOptions(dtype)).zero_();
      for (std::size_t i = 0; i < from.member_count; ++i)
        bucket.views.push_back(dense_view(bucket.flat, static_cast<std::int64_t>(from.offsets[i]),
                                          parameters_[from.members[i]]));
    }
    return buckets;
  }

  // Makes the memory of a bucket that of its members' gradients.
  void adopt(const Bucket& bucket) {
    for (std::size_t i = 0; i < bucket.members.size(); ++i) {
      const std::uint32_t index = bucket.members[i];
      places_[index] = bucket.views[i];
      gradients_[index] = bucket.views[i].variable_data();
      addresses_[index] = bucket.views[i].const_data_ptr();
    }
  }

  void set_tail() {
    const at::Tensor& flat = buckets_.back().flat;
    const at::Tensor tail = flat.narrow(0, flat.numel() - SHOAL_TAIL_ELEMENTS, SHOAL_TAIL_ELEMENTS);
    tail_ = tail.is_complex() ? at::real(tail) : tail;
  }

  // Gives a bucket new memory; averages of members that the program keeps will be copied out of it.
  // Only this rank needs it, so it must not fail alone: without registered memory it uses ordinary memory.
  void renew(std::size_t number, const std::vector<std::uint32_t>& kept) {
    const at::NoGradGuard no_grad;
    Bucket& bucket = buckets_[number];
    const at::Tensor old = bucket.flat;
    try {
      bucket.flat = empty(group_, old.sizes(), old.options());
    } catch (const OutOfSharedMemory&) {
      bucket.flat = at::empty_like(old);
    }
    bucket.flat.zero_();
    for (at::Tensor& place : bucket.views)
      place = bucket.flat.as_strided(place.sizes(), place.strides(), place.storage_offset());
    for (const std::uint32_t index : kept) copied_[index] = true;
    for (const std::uint32_t index : bucket.members)  // these gradients stay in the old memory
      if (parameters_[index].grad().is_same(gradients_[index])) copied_[index] = true;
    adopt(bucket);
    if (number + 1 == buckets_.size()) set_tail();
    references_[number] = bucket.flat.storage().use_count();
  }

  bool is_in_place(std::size_t index, const at::Tensor& gradient) const {
    return !copied_[index] && gradient.layout() == at::kStrided &&
           gradient.const_data_ptr() == addresses_[index];
  }

  // The gradient in a bucket, renewed if it was changed to refer to other memory.
  const at::Tensor& view(std::size_t index) {
    if (gradients_[index].const_data_ptr() != addresses_[index])
      gradients_[index] = places_[index].variable_data();
    return gradients_[index];
  }

  Group group_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  std::uint64_t max_bytes_;
  std::vector<bool> copied_;  // by parameter: averages are copied out, because the program keeps references
  std::vector<Bucket> buckets_;
  at::Tensor tail_;
  std::vector<at::Tensor> places_;       // by parameter: the memory of its gradient
  std::vector<at::Tensor> gradients_;    // by parameter: `grad` while the gradient is in its bucket
  std::vector<const void*> addresses_;   // of `gradients_`
  std::vector<std::size_t> references_;  // by bucket: number of references to its memory that are ours
};

}  // namespace detail
}  // namespace frontend
}  // namespace shoal
