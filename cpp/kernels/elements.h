// Element types: loading, arithmetic and storing of each dtype.
//
// Compiled once per level.  Everything here has internal linkage and calls no function of the standard
// library that could be emitted out of line: the linker would merge such functions of several levels and
// might keep the AVX-512 version for a CPU without AVX-512.
//
// An element type E has
//   Storage, Scalar   the type in memory, and the type of arithmetic and of the accumulator
//   kLanes, One       elements per step, and the element type for the remainder (kLanes == 1)
//   load, store       memory <-> value; a value is a Scalar, or a vector of kLanes Scalars
//   peek, poke        accumulator memory <-> value
// For types with one lane, the compiler vectorises the loop.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace shoal::kernels {
namespace {

template <class T>
struct Plain {
  using Storage = T;
  using Scalar = T;
  using One = Plain;
  static constexpr size_t kLanes = 1;
  static T load(const T* p) { return *p; }
  static void store(T* p, T value) { *p = value; }
  static T peek(const T* p) { return *p; }
  static void poke(T* p, T value) { *p = value; }
};

// An integer with a wider accumulator, for AVG.
template <class T, class Wide>
struct Widened : Plain<Wide> {
  using Storage = T;
  using One = Widened;
  static Wide load(const T* p) { return *p; }
  static void store(T* p, Wide value) { *p = static_cast<T>(value); }
};

struct Bool : Plain<uint8_t> {
  using One = Bool;
  static uint8_t load(const uint8_t* p) { return *p != 0; }
};

// A product that is rounded before it is used.  Even with -ffp-contract=off, GCC 12 and later would otherwise
// fuse the alternating sums of products below.
template <class T>
T rounded_product(T a, T b) {
#if __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(a * b);
#else
  return a * b;
#endif
}

template <class T>
struct Pair {
  T re, im;
  friend Pair operator*(Pair a, Pair b) {
    return {rounded_product(a.re, b.re) - rounded_product(a.im, b.im),
            rounded_product(a.re, b.im) + rounded_product(a.im, b.re)};
  }
};

// Complex numbers for PRODUCT, which cannot treat the parts as separate reals.
template <class T>
using Complex = Plain<Pair<T>>;

struct BFloat16 : Plain<float> {
  using Storage = uint16_t;
  using One = BFloat16;
  static float load(const uint16_t* p) { return __builtin_bit_cast(float, static_cast<uint32_t>(*p) << 16); }
  // Rounds to nearest even.  NaN is already canonical, so the addition cannot carry into the sign.
  static void store(uint16_t* p, float value) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    *p = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

// binary16 in integer and float32 arithmetic, without branches so that the loop is vectorised.
// Method: the FP16 library by M. Dukhan (fp16_ieee_from_fp32_value and its inverse).
struct SoftHalf : Plain<float> {
  using Storage = uint16_t;
  using One = SoftHalf;

  static float load(const uint16_t* p) {
    const uint32_t word = static_cast<uint32_t>(*p) << 16;
    const uint32_t twice = word + word;
    const float normal = __builtin_bit_cast(float, (twice >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
    const float subnormal = __builtin_bit_cast(float, (twice >> 17) | (126u << 23)) - 0.5f;
    const uint32_t magnitude =
        twice < (1u << 27) ? __builtin_bit_cast(uint32_t, subnormal) : __builtin_bit_cast(uint32_t, normal);
    return __builtin_bit_cast(float, (word & 0x80000000u) | magnitude);
  }

  static void store(uint16_t* p, float value) {
    const uint32_t word = __builtin_bit_cast(uint32_t, value);
    const uint32_t twice = word + word;
    // Overflow to infinity first, then scale so that adding `bias` rounds at the right bit.
    const float magnitude = __builtin_bit_cast(float, word & 0x7fffffffu);
    const float scaled = (magnitude * 0x1.0p+112f) * 0x1.0p-110f;
    const uint32_t exponent = twice & 0xff000000u;
    const uint32_t bias = exponent < 0x71000000u ? 0x71000000u : exponent;
    const uint32_t bits =
        __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, (bias >> 1) + 0x07800000u) + scaled);
    const uint32_t rounded = ((bits >> 13) & 0x7c00u) + (bits & 0x0fffu);
    *p = static_cast<uint16_t>(((word & 0x80000000u) >> 16) | (twice > 0xff000000u ? 0x7e00u : rounded));
  }
};

#if defined(__F16C__)

struct HalfOne : Plain<float> {
  using Storage = uint16_t;
  using One = HalfOne;
  static float load(const uint16_t* p) { return _cvtsh_ss(*p); }
  static void store(uint16_t* p, float value) {
    *p = static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
  }
};

// Compilers have no vector type for binary16 with which they could vectorise the conversion.
struct Half {
  using Storage = uint16_t;
  using Scalar = float;
  using One = HalfOne;
#if defined(__AVX512F__)
  static constexpr size_t kLanes = 16;
  using Vector = float __attribute__((vector_size(64)));
  // The masked intrinsics, because GCC 12 warns about an uninitialised value in the plain ones.
  static Vector load(const uint16_t* p) {
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i_u*)p));
  }
  static void store(uint16_t* p, Vector value) {
    _mm256_storeu_si256((__m256i_u*)p, _mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT));
  }
  static Vector peek(const float* p) { return _mm512_loadu_ps(p); }
  static void poke(float* p, Vector value) { _mm512_storeu_ps(p, value); }
#else
  static constexpr size_t kLanes = 8;
  using Vector = float __attribute__((vector_size(32)));
  static Vector load(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u*)p)); }
  static void store(uint16_t* p, Vector value) {
    _mm_storeu_si128((__m128i_u*)p, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
  static Vector peek(const float* p) { return _mm256_loadu_ps(p); }
  static void poke(float* p, Vector value) { _mm256_storeu_ps(p, value); }
#endif
};

#else
using Half = SoftHalf;
#endif

}  // namespace
}  // namespace shoal::kernels
