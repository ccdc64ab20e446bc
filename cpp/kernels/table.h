// The table of the loops of a level, by dtype and op.
//
// The including file defines SHOAL_LEVEL as the name of its table (see level.h) and is compiled with that
// level's flags.  Everything else has internal linkage (see elements.h for the reason).
#pragma once

#include "kernels/loops.h"
#include "kernels/stream.h"

namespace shoal::kernels {
namespace {

// `kHot`: has loops for 3 and 4 sources and for several outs, which are not worth their code elsewhere.
template <class E, class Op, bool kHot = false>
Kernels kernels(size_t parts = 1) {
  Kernels found = {
      {fused<E, Op, 1, 1>, fused<E, Op, 2, 1>},
      {},
      load<E>,
      fold<E, Op>,
      combine<typename E::Scalar, Op>,
      finish<E, Op>,
      sizeof(typename E::Storage),
      sizeof(typename E::Scalar),
      parts,
  };
  if constexpr (kHot) {
    found.to_one[2] = fused<E, Op, 3, 1>;
    found.to_one[3] = fused<E, Op, 4, 1>;
    found.to_all[1] = fused<E, Op, 2, 2>;
    found.to_all[2] = fused<E, Op, 3, 3>;
    found.to_all[3] = fused<E, Op, 4, 4>;
  }
  return found;
}

template <class E, bool kHot>
Kernels find_float(RedOp op, size_t parts = 1) {
  switch (op) {
    case RedOp::kSum:
    case RedOp::kPremulSum:  // the ranks have already multiplied
      return kernels<E, Sum, kHot>(parts);
    case RedOp::kAvg:
      return kernels<E, Average, kHot>(parts);
    case RedOp::kProduct:
      return kernels<E, Product>();
    case RedOp::kMin:
      return kernels<E, Min>();
    case RedOp::kMax:
      return kernels<E, Max>();
    default:
      return {};
  }
}

// Except for PRODUCT, complex numbers are pairs of reals.
template <class T>
Kernels find_complex(RedOp op) {
  return op == RedOp::kProduct ? kernels<Complex<T>, Product>() : find_float<Plain<T>, true>(op, 2);
}

// Where the sign does not matter, the unsigned type is used for both; it wraps by definition.
template <class T>
Kernels find_integer(RedOp op) {
  using U = std::make_unsigned_t<T>;
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  switch (op) {
    case RedOp::kSum:
      return kernels<Plain<U>, Sum>();
    case RedOp::kAvg:
      return kernels<Widened<T, Wide>, Average>();
    case RedOp::kProduct:
      return kernels<Plain<U>, Product>();
    case RedOp::kMin:
      return kernels<Plain<T>, Min>();
    case RedOp::kMax:
      return kernels<Plain<T>, Max>();
    case RedOp::kBand:
      return kernels<Plain<U>, And>();
    case RedOp::kBor:
      return kernels<Plain<U>, Or>();
    case RedOp::kBxor:
      return kernels<Plain<U>, Xor>();
    default:
      return {};
  }
}

Kernels find_bool(RedOp op) {
  switch (op) {
    case RedOp::kSum:
    case RedOp::kMax:
    case RedOp::kBor:
      return kernels<Bool, Or>();
    case RedOp::kProduct:
    case RedOp::kMin:
    case RedOp::kBand:
      return kernels<Bool, And>();
    case RedOp::kBxor:
      return kernels<Bool, Xor>();
    default:
      return {};
  }
}

Kernels find(DType dtype, RedOp op) {
  switch (dtype) {
    case DType::kFloat64:
      return find_float<Plain<double>, true>(op);
    case DType::kFloat32:
      return find_float<Plain<float>, true>(op);
    case DType::kFloat16:
      return find_float<Half, true>(op);
    case DType::kBFloat16:
      return find_float<BFloat16, true>(op);
    case DType::kInt8:
      return find_integer<int8_t>(op);
    case DType::kUInt8:
      return find_integer<uint8_t>(op);
    case DType::kInt16:
      return find_integer<int16_t>(op);
    case DType::kUInt16:
      return find_integer<uint16_t>(op);
    case DType::kInt32:
      return find_integer<int32_t>(op);
    case DType::kUInt32:
      return find_integer<uint32_t>(op);
    case DType::kInt64:
      return find_integer<int64_t>(op);
    case DType::kUInt64:
      return find_integer<uint64_t>(op);
    case DType::kBool:
      return find_bool(op);
    case DType::kComplex64:
      return find_complex<float>(op);
    case DType::kComplex128:
      return find_complex<double>(op);
    default:
      return {};
  }
}

}  // namespace

extern const Level SHOAL_LEVEL = {find, stream};

}  // namespace shoal::kernels
