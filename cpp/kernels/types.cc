#include "kernels/types.h"

namespace shoal {
namespace {

enum class Family : uint8_t { kFloat, kInteger, kBool, kComplex, kBytes };

struct Entry {
  const char* name;
  size_t size;
  Family family;
};

constexpr Entry kDTypes[kDTypeCount] = {
    {"float64", 8, Family::kFloat},
    {"float32", 4, Family::kFloat},
    {"float16", 2, Family::kFloat},
    {"bfloat16", 2, Family::kFloat},
    {"float8_e4m3fn", 1, Family::kBytes},
    {"float8_e5m2", 1, Family::kBytes},
    {"float8_e4m3fnuz", 1, Family::kBytes},
    {"float8_e5m2fnuz", 1, Family::kBytes},
    {"int8", 1, Family::kInteger},
    {"uint8", 1, Family::kInteger},
    {"int16", 2, Family::kInteger},
    {"uint16", 2, Family::kInteger},
    {"int32", 4, Family::kInteger},
    {"uint32", 4, Family::kInteger},
    {"int64", 8, Family::kInteger},
    {"uint64", 8, Family::kInteger},
    {"bool", 1, Family::kBool},
    {"complex64", 8, Family::kComplex},
    {"complex128", 16, Family::kComplex},
    {"complex32", 4, Family::kBytes},
};

constexpr const char* kRedOps[kRedOpCount] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                              "BAND", "BOR", "BXOR",    "PREMUL_SUM"};

constexpr unsigned bit(RedOp op) { return 1u << static_cast<unsigned>(op); }

constexpr unsigned kOrder = bit(RedOp::kMin) | bit(RedOp::kMax);
constexpr unsigned kBits = bit(RedOp::kBand) | bit(RedOp::kBor) | bit(RedOp::kBxor);
constexpr unsigned kRing = bit(RedOp::kSum) | bit(RedOp::kProduct);

unsigned legal_ops(Family family) {
  switch (family) {
    case Family::kFloat:
      return kRing | bit(RedOp::kAvg) | bit(RedOp::kPremulSum) | kOrder;
    case Family::kInteger:
      return kRing | bit(RedOp::kAvg) | kOrder | kBits;
    case Family::kBool:
      return kRing | kOrder | kBits;
    case Family::kComplex:
      return kRing | bit(RedOp::kAvg) | bit(RedOp::kPremulSum);
    case Family::kBytes:
      break;
  }
  return 0;
}

const Entry* find(DType dtype) {
  return static_cast<int>(dtype) < kDTypeCount ? &kDTypes[static_cast<int>(dtype)] : nullptr;
}

}  // namespace

size_t itemsize(DType dtype) {
  const Entry* entry = find(dtype);
  return entry ? entry->size : 0;
}

bool legal(DType dtype, RedOp op) {
  const Entry* entry = find(dtype);
  return entry && static_cast<int>(op) < kRedOpCount && (legal_ops(entry->family) & bit(op));
}

const char* name(DType dtype) {
  const Entry* entry = find(dtype);
  return entry ? entry->name : "dtype?";
}

const char* name(RedOp op) {
  return static_cast<int>(op) < kRedOpCount ? kRedOps[static_cast<int>(op)] : "op?";
}

}  // namespace shoal
