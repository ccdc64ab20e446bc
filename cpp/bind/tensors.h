// Reads a tensor's attributes without the microsecond that asking Python for each of them costs.
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
  std::span<const std::int64_t> shape;  // the tensor's own
};

// A dense, contiguous CPU tensor whose memory holds its elements as they are, of exactly the class that
// `learn_tensors` was told; nullopt for everything else, and where torch has no such table (before 2.10).
std::optional<PlainTensor> plain_tensor(PyObject* object);

// A new tensor on the CPU with a copy of `bytes` of elements, which must be as many as shape and dtype say;
// null with an exception set where there is none.
PyObject* new_tensor(DType dtype, std::span<const std::int64_t> shape, const std::byte* data,
                     std::size_t bytes);

// Where the memory of a tensor begins, as `data_ptr()` says.  Raises nb::python_error where there is none.
std::uint64_t address_of(PyObject* object);

// The class torch.Tensor: takes the function table that torch publishes on it (DLPack 1.2,
// `__dlpack_c_exchange_api__`).  The table is torch's and lives as long as the process, and so is what is
// kept here.
void learn_tensors(PyObject* tensor_class);

}  // namespace shoal
