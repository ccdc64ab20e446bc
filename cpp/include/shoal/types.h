// Dtypes, reductions, and the memory that operations read and write.
#pragma once

#include <chrono>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace shoal {
inline namespace frontend {

/// The type of an element.  The values are the codes on the wire.
enum class Dtype : int {
  float64 = 0,
  float32 = 1,
  float16 = 2,
  bfloat16 = 3,
  float8_e4m3fn = 4,
  float8_e5m2 = 5,
  float8_e4m3fnuz = 6,
  float8_e5m2fnuz = 7,
  int8 = 8,
  uint8 = 9,
  int16 = 10,
  uint16 = 11,
  int32 = 12,
  uint32 = 13,
  int64 = 14,
  uint64 = 15,
  boolean = 16,
  complex64 = 17,
  complex128 = 18,
  complex32 = 19,
};

/// A reduction.  The average of integers truncates toward zero; of booleans, sum and max are *or*, product
/// and min are *and*; min and max propagate NaN.
enum class ReduceOp : int { sum = 0, avg = 1, product = 2, min = 3, max = 4, band = 5, bor = 6, bxor = 7 };

inline constexpr ReduceOp sum = ReduceOp::sum, avg = ReduceOp::avg, product = ReduceOp::product,
                          min = ReduceOp::min, max = ReduceOp::max, band = ReduceOp::band,
                          bor = ReduceOp::bor, bxor = ReduceOp::bxor;

/// A time in seconds.  Zero: the timeout of the group.
using Seconds = std::chrono::duration<double>;

/// Receive from any rank.
inline constexpr int any_source = -1;

namespace detail {

template <class E>
constexpr Dtype dtype_of() {
  if constexpr (std::is_same_v<E, double>) return Dtype::float64;
  if constexpr (std::is_same_v<E, float>) return Dtype::float32;
  if constexpr (std::is_same_v<E, bool>) return Dtype::boolean;
  if constexpr (std::is_same_v<E, std::complex<float>>) return Dtype::complex64;
  if constexpr (std::is_same_v<E, std::complex<double>>) return Dtype::complex128;
  if constexpr (std::is_integral_v<E> && !std::is_same_v<E, bool>) {
    constexpr Dtype codes[2][4] = {{Dtype::uint8, Dtype::uint16, Dtype::uint32, Dtype::uint64},
                                   {Dtype::int8, Dtype::int16, Dtype::int32, Dtype::int64}};
    constexpr int width = sizeof(E) == 1 ? 0 : sizeof(E) == 2 ? 1 : sizeof(E) == 4 ? 2 : 3;
    return codes[std::is_signed_v<E>][width];
  }
}

}  // namespace detail

/// Elements in memory.  The array may own the memory; copies share it.
///
/// Without an owner, the memory must stay valid until the operations on it are complete.
template <class E>
class Array {
 public:
  Array() = default;
  Array(E* data, std::size_t size, std::shared_ptr<void> owner = nullptr)
      : data_(data), size_(size), owner_(std::move(owner)) {}
  /// The elements of a vector, which must outlive the operations.
  Array(std::vector<E>& elements) : Array(elements.data(), elements.size()) {}

  E* data() const { return data_; }
  std::size_t size() const { return size_; }
  E* begin() const { return data_; }
  E* end() const { return data_ + size_; }
  E& operator[](std::size_t index) const { return data_[index]; }

 private:
  E* data_ = nullptr;
  std::size_t size_ = 0;
  std::shared_ptr<void> owner_;
};
template <class E>
Array(E*, std::size_t) -> Array<E>;
template <class E>
Array(std::vector<E>&) -> Array<E>;

namespace detail {

// The memory of one argument of an operation.
struct View {
  void* data = nullptr;
  std::uint64_t count = 0;  // elements
  std::uint64_t bytes = 0;
  Dtype dtype = Dtype::uint8;
};

/// Describes a class of tensors.  shoal/torch/tensor.h has the specialisation for torch.
template <class T>
struct Tensors;  // operations take shoal::Array, or at::Tensor after #include <shoal/torch.h>

template <class E>
struct Tensors<Array<E>> {
  static View view(const Array<E>& array, const char*) {
    return {array.data(), array.size(), array.size() * sizeof(E), dtype_of<E>()};
  }
  static std::vector<std::uint64_t> shape(const Array<E>& array) { return {array.size()}; }
  // A new array of the same size.
  static Array<E> like(const Array<E>& array) {
    auto memory = std::make_shared<std::unique_ptr<E[]>>(new E[array.size()]);
    return Array<E>(memory->get(), array.size(), memory);
  }
};

}  // namespace detail
}  // namespace frontend
}  // namespace shoal
