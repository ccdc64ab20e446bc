// Dtypes, reductions, and the legal combinations of them.
//
// The codes are those of src/shoal/spec.py (DTYPE_CODES, LEGAL_REDUCTIONS): Python passes them to the core,
// and fingerprints contain them.  tests/core/test_kernels.py compares the two tables.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal {

enum class DType : uint8_t {
  kFloat64 = 0,
  kFloat32 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kFloat8E4M3FN = 4,
  kFloat8E5M2 = 5,
  kFloat8E4M3FNUZ = 6,
  kFloat8E5M2FNUZ = 7,
  kInt8 = 8,
  kUInt8 = 9,
  kInt16 = 10,
  kUInt16 = 11,
  kInt32 = 12,
  kUInt32 = 13,
  kInt64 = 14,
  kUInt64 = 15,
  kBool = 16,
  kComplex64 = 17,
  kComplex128 = 18,
  kComplex32 = 19,
};
inline constexpr int kDTypeCount = 20;

enum class RedOp : uint8_t {
  kSum = 0,
  kAvg = 1,
  kProduct = 2,
  kMin = 3,
  kMax = 4,
  kBand = 5,
  kBor = 6,
  kBxor = 7,
  kPremulSum = 8,
};
inline constexpr int kRedOpCount = 9;

// Bytes of one element; 0 for a code that is not a dtype.
size_t itemsize(DType dtype);

// Whether `op` is defined for `dtype`; false for unknown codes, which a received header may contain.
bool legal(DType dtype, RedOp op);

// Names for error messages, such as "float32" and "SUM"; "dtype?" and "op?" for unknown codes.
const char* name(DType dtype);
const char* name(RedOp op);

}  // namespace shoal
