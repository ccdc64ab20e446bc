// The reductions: a value and a value to a value, written so that scalars and vectors both fit.
//
// Compiled once per level, like elements.h, and under the same rule.
#pragma once

#include <type_traits>

namespace shoal::kernels {
namespace {

// How an op treats values after `apply`: divided or not.
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
      return static_cast<V>(1u * a * b);  // uint16_t would be promoted to a signed int, and overflow it
    } else {
      return a * b;
    }
  }
};
// A NaN on the left stays because no comparison with it holds; one on the right is taken.
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
