// Tensors of torch as arguments of operations.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "shoal/group.h"

namespace shoal {
inline namespace frontend {
namespace detail {

inline Dtype dtype_of(const at::Tensor& tensor, const char* operation) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return Dtype::float64;
    case at::kFloat:
      return Dtype::float32;
    case at::kHalf:
      return Dtype::float16;
    case at::kBFloat16:
      return Dtype::bfloat16;
    case at::kFloat8_e4m3fn:
      return Dtype::float8_e4m3fn;
    case at::kFloat8_e5m2:
      return Dtype::float8_e5m2;
    case at::kFloat8_e4m3fnuz:
      return Dtype::float8_e4m3fnuz;
    case at::kFloat8_e5m2fnuz:
      return Dtype::float8_e5m2fnuz;
    case at::kChar:
      return Dtype::int8;
    case at::kByte:
      return Dtype::uint8;
    case at::kShort:
      return Dtype::int16;
    case at::kUInt16:
      return Dtype::uint16;
    case at::kInt:
      return Dtype::int32;
    case at::kUInt32:
      return Dtype::uint32;
    case at::kLong:
      return Dtype::int64;
    case at::kUInt64:
      return Dtype::uint64;
    case at::kBool:
      return Dtype::boolean;
    case at::kComplexFloat:
      return Dtype::complex64;
    case at::kComplexDouble:
      return Dtype::complex128;
    case at::kComplexHalf:
      return Dtype::complex32;
    default:
      throw UsageError(std::string(operation) + ": tensors of " + c10::toString(tensor.scalar_type()) +
                       " cannot be sent");
  }
}

template <>
struct Tensors<at::Tensor> {
  static View view(const at::Tensor& tensor, const char* operation) {
    const auto refuse = [&](const std::string& why) {
      throw UsageError(std::string(operation) + ": " + why);
    };
    if (!tensor.defined()) refuse("the tensor is undefined");
    if (!tensor.device().is_cpu())
      refuse("the tensor is on " + tensor.device().str() +
             ", and C++ programs send tensors on the CPU; pass tensor.cpu()");
    if (tensor.layout() != at::kStrided) refuse("the tensor is not dense; pass tensor.to_dense()");
    if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg())
      refuse(
          "the tensor is not contiguous, or conjugated or negated lazily; pass a copy, "
          "tensor.resolve_conj().resolve_neg().contiguous(), and copy the result back");
    return {tensor.data_ptr(), static_cast<std::uint64_t>(tensor.numel()), tensor.nbytes(),
            dtype_of(tensor, operation)};
  }
  static std::vector<std::uint64_t> shape(const at::Tensor& tensor) {
    return std::vector<std::uint64_t>(tensor.sizes().begin(), tensor.sizes().end());
  }
  static at::Tensor like(const at::Tensor& tensor) { return at::empty_like(tensor.detach()); }
};

}  // namespace detail

/// An uninitialised tensor in memory that all ranks of this host share, where collectives are fastest.
inline at::Tensor empty(const Group& group, at::IntArrayRef sizes,
                        const at::TensorOptions& options = at::TensorOptions()) {
  const at::Tensor shape = at::empty(sizes, at::TensorOptions(options.dtype()).device(at::kMeta));
  auto [data, owner] = group.allocate(shape.nbytes());
  return at::from_blob(data, sizes, [kept = owner](void*) mutable { kept.reset(); }, options);
}

}  // namespace frontend
}  // namespace shoal
