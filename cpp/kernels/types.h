// Dtypes and reductions, and which reduction has a meaning for which dtype.
//
// The codes are those of src/shoal/spec.py (DTYPE_CODES, LEGAL_REDUCTIONS): they travel from Python into
// the core and in the fingerprints on the wire.  tests/core/test_kernels.py compares the two tables.
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

// Bytes of one element; 0 for a code that is no dtype.
size_t itemsize(DType dtype);

// Whether `op` has a meaning for `dtype`; false for codes that do not exist (a header from the wire may
// hold anything).
bool legal(DType dtype, RedOp op);

// For error messages: "float32", "SUM"; "dtype?" and "op?" for codes that do not exist.
const char* name(DType dtype);
const char* name(RedOp op);

}  // namespace shoal
