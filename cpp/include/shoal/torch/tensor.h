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

// A dtype that can be sent, and its name in Python.
struct SentDtype {
  at::ScalarType type;
  Dtype code;
  const char* name;
};
inline constexpr SentDtype kSentDtypes[] = {{at::kDouble, Dtype::float64, "float64"},
                                            {at::kFloat, Dtype::float32, "float32"},
                                            {at::kHalf, Dtype::float16, "float16"},
                                            {at::kBFloat16, Dtype::bfloat16, "bfloat16"},
                                            {at::kFloat8_e4m3fn, Dtype::float8_e4m3fn, "float8_e4m3fn"},
                                            {at::kFloat8_e5m2, Dtype::float8_e5m2, "float8_e5m2"},
                                            {at::kFloat8_e4m3fnuz, Dtype::float8_e4m3fnuz, "float8_e4m3fnuz"},
                                            {at::kFloat8_e5m2fnuz, Dtype::float8_e5m2fnuz, "float8_e5m2fnuz"},
                                            {at::kChar, Dtype::int8, "int8"},
                                            {at::kByte, Dtype::uint8, "uint8"},
                                            {at::kShort, Dtype::int16, "int16"},
                                            {at::kUInt16, Dtype::uint16, "uint16"},
                                            {at::kInt, Dtype::int32, "int32"},
                                            {at::kUInt32, Dtype::uint32, "uint32"},
                                            {at::kLong, Dtype::int64, "int64"},
                                            {at::kUInt64, Dtype::uint64, "uint64"},
                                            {at::kBool, Dtype::boolean, "bool"},
                                            {at::kComplexFloat, Dtype::complex64, "complex64"},
                                            {at::kComplexDouble, Dtype::complex128, "complex128"},
                                            {at::kComplexHalf, Dtype::complex32, "complex32"}};

inline Dtype dtype_of(const at::Tensor& tensor, const char* operation) {
  for (const SentDtype& known : kSentDtypes)
    if (known.type == tensor.scalar_type()) return known.code;
  throw UsageError(std::string(operation) + ": tensors of " + c10::toString(tensor.scalar_type()) +
                   " cannot be sent");
}

// The name of a dtype in Python.
inline std::string dtype_name(at::ScalarType dtype) {
  for (const SentDtype& known : kSentDtypes)
    if (known.type == dtype) return known.name;
  return c10::toString(dtype);
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
