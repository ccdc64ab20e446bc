// The loops over a block, for any element type and op.  Compiled once per level.
#pragma once

#include "kernels/elements.h"
#include "kernels/level.h"
#include "kernels/ops.h"

// Sources and destinations may be identical; a run-time check for aliasing would treat that as overlap.
#if defined(__clang__)
#define SHOAL_ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define SHOAL_ELEMENTWISE _Pragma("GCC ivdep")
#endif

namespace shoal::kernels {
namespace {

template <class V>
V canonical(V value) {
  return value != value ? V{} + static_cast<float>(__builtin_nanf("")) : value;
}
template <class T>
Pair<T> canonical(Pair<T> value) {
  return {canonical(value.re), canonical(value.im)};
}

// The reduction's parameters, in the type of arithmetic.
template <class E, class Op>
struct Steps {
  using Scalar = typename E::Scalar;
  using Storage = typename E::Storage;

  explicit Steps(const Reduction& reduction) {
    if constexpr (Op::kDivide) scale = static_cast<Scalar>(reduction.divisor);
  }

  template <class L, class V>
  void out(Storage* p, V value) const {
    if constexpr (Op::kDivide) value = value / scale;
    if constexpr (!std::is_integral_v<Scalar>) value = canonical(value);
    L::store(p, value);
  }

  // Combines sources 0 to K in index order.
  template <class L, size_t K>
  auto chain(const Storage* const* srcs, size_t i) const {
    if constexpr (K == 0) {
      return L::load(srcs[0] + i);
    } else {
      return Op::apply(chain<L, K - 1>(srcs, i), L::load(srcs[K] + i));
    }
  }

  Scalar scale{};
};

// Calls step.operator()<L>(i) for every i; L is E for whole vectors and E::One for the remainder.
template <class E, class Step>
inline void sweep(size_t n, Step step) {
  size_t i = 0;
  if constexpr (E::kLanes > 1) {
    for (; i + E::kLanes <= n; i += E::kLanes) step.template operator()<E>(i);
  }
  SHOAL_ELEMENTWISE
  for (; i < n; ++i) step.template operator()<typename E::One>(i);
}

template <class E, class Op, size_t N, size_t D>
void fused(void* const* outs, const void* const* srcs, size_t n, const Reduction& reduction) {
  using Storage = typename E::Storage;
  struct {
    const Storage* in[N];
    Storage* out[D];
  } at;  // a struct, so that the closure contains the addresses themselves
  for (size_t k = 0; k < N; ++k) at.in[k] = static_cast<const Storage*>(srcs[k]);
  for (size_t k = 0; k < D; ++k) at.out[k] = static_cast<Storage*>(outs[k]);
  const Steps<E, Op> steps(reduction);
  sweep<E>(n, [=]<class L>(size_t i) {
    const auto value = steps.template chain<L, N - 1>(at.in, i);
    for (size_t k = 0; k < D; ++k) steps.template out<L>(at.out[k] + i, value);
  });
}

template <class E>
void load(void* acc, const void* src, size_t n) {
  auto* a = static_cast<typename E::Scalar*>(acc);
  auto* s = static_cast<const typename E::Storage*>(src);
  sweep<E>(n, [=]<class L>(size_t i) { L::poke(a + i, L::load(s + i)); });
}

template <class E, class Op>
void fold(void* acc, const void* src, size_t n) {
  auto* a = static_cast<typename E::Scalar*>(acc);
  auto* s = static_cast<const typename E::Storage*>(src);
  sweep<E>(n, [=]<class L>(size_t i) { L::poke(a + i, Op::apply(L::peek(a + i), L::load(s + i))); });
}

template <class Scalar, class Op>
void combine(void* acc, const void* a, const void* b, size_t n) {
  auto* to = static_cast<Scalar*>(acc);
  auto* x = static_cast<const Scalar*>(a);
  auto* y = static_cast<const Scalar*>(b);
  sweep<Plain<Scalar>>(n, [=]<class L>(size_t i) { to[i] = Op::apply(x[i], y[i]); });
}

template <class E, class Op>
void finish(void* out, const void* acc, size_t n, const Reduction& reduction) {
  auto* to = static_cast<typename E::Storage*>(out);
  auto* a = static_cast<const typename E::Scalar*>(acc);
  const Steps<E, Op> steps(reduction);
  sweep<E>(n, [=]<class L>(size_t i) { steps.template out<L>(to + i, L::peek(a + i)); });
}

}  // namespace
}  // namespace shoal::kernels
