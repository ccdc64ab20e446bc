// The reductions, as binary functions that accept both scalars and vectors.
//
// Compiled once per level, under the same rule as elements.h.
#pragma once

#include <type_traits>

namespace shoal::kernels {
namespace {

// Whether the result is divided after `apply`.
struct Plan {
  static constexpr bool kDivide = false;
};

struct Sum : Plan {
  template <class V>
  static V apply(V a, V b) {
    if constexpr (std::is_integral_v<V>) {
      using U = std::make_unsigned_t<V>;  // wraps; only the accumulator of AVG is signed
      return static_cast<V>(static_cast<U>(a) + static_cast<U>(b));
    } else {
      return a + b;
    }
  }
};
struct Average : Sum {
  static constexpr bool kDivide = true;
};
struct Product : Plan {
  template <class V>
  static V apply(V a, V b) {
    if constexpr (std::is_integral_v<V>) {
      return static_cast<V>(1u * a * b);  // otherwise uint16_t is promoted to int, which could overflow
    } else {
      return a * b;
    }
  }
};
// A NaN in `a` remains because no comparison with it is true; a NaN in `b` is taken.
struct Min : Plan {
  template <class V>
  static V apply(V a, V b) {
    return (b < a) | (b != b) ? b : a;
  }
};
struct Max : Plan {
  template <class V>
  static V apply(V a, V b) {
    return (b > a) | (b != b) ? b : a;
  }
};
struct And : Plan {
  template <class V>
  static V apply(V a, V b) {
    return static_cast<V>(a & b);
  }
};
struct Or : Plan {
  template <class V>
  static V apply(V a, V b) {
    return static_cast<V>(a | b);
  }
};
struct Xor : Plan {
  template <class V>
  static V apply(V a, V b) {
    return static_cast<V>(a ^ b);
  }
};

}  // namespace
}  // namespace shoal::kernels
