// Access to a tensor's attributes, without the microsecond that each of them costs in Python.
#pragma once

#include <Python.h>

#include <cstdint>
#include <optional>
#include <span>

#include "engine/operation.h"

namespace shoal {

struct PlainTensor {
  Span span;
  std::uint64_t count = 0;
  DType dtype{};
  std::span<const std::int64_t> shape;  // owned by the tensor
};

// Describes a dense, contiguous CPU tensor with materialized elements, of exactly the class passed to
// `learn_tensors`; nullopt for everything else, and if torch has no function table (before 2.10).
std::optional<PlainTensor> plain_tensor(PyObject* object);

// Creates a CPU tensor with a copy of `bytes` of elements, which must match shape and dtype; null with an
// exception set on failure.
PyObject* new_tensor(DType dtype, std::span<const std::int64_t> shape, const std::byte* data,
                     std::size_t bytes);

// The address of a tensor's memory, as `data_ptr()` returns it.  Throws nb::python_error if it has none.
std::uint64_t address_of(PyObject* object);

// Takes the class torch.Tensor and the function table that torch publishes on it (DLPack 1.2,
// `__dlpack_c_exchange_api__`).  The table exists as long as the process, and so does the state kept here.
void learn_tensors(PyObject* tensor_class);

}  // namespace shoal
