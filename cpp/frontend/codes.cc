// The public headers have the codes of the core.
#include "kernels/types.h"
#include "net/frame.h"
#include "shoal/abi.h"
#include "shoal/types.h"

namespace shoal {
namespace {

constexpr bool equal(auto a, auto b) { return static_cast<int>(a) == static_cast<int>(b); }

static_assert(equal(SHOAL_ALL_REDUCE, Kind::kAllReduce));
static_assert(equal(SHOAL_REDUCE, Kind::kReduce));
static_assert(equal(SHOAL_BROADCAST, Kind::kBroadcast));
static_assert(equal(SHOAL_ALL_GATHER, Kind::kAllGather));
static_assert(equal(SHOAL_REDUCE_SCATTER, Kind::kReduceScatter));
static_assert(equal(SHOAL_GATHER, Kind::kGather));
static_assert(equal(SHOAL_SCATTER, Kind::kScatter));
static_assert(equal(SHOAL_ALL_TO_ALL, Kind::kAllToAll));
static_assert(equal(SHOAL_BARRIER, Kind::kBarrier));
static_assert(equal(SHOAL_SEND, Kind::kSend));
static_assert(equal(SHOAL_RECV, Kind::kRecv));

static_assert(equal(Dtype::float64, DType::kFloat64));
static_assert(equal(Dtype::float32, DType::kFloat32));
static_assert(equal(Dtype::float16, DType::kFloat16));
static_assert(equal(Dtype::bfloat16, DType::kBFloat16));
static_assert(equal(Dtype::float8_e4m3fn, DType::kFloat8E4M3FN));
static_assert(equal(Dtype::float8_e5m2, DType::kFloat8E5M2));
static_assert(equal(Dtype::float8_e4m3fnuz, DType::kFloat8E4M3FNUZ));
static_assert(equal(Dtype::float8_e5m2fnuz, DType::kFloat8E5M2FNUZ));
static_assert(equal(Dtype::int8, DType::kInt8));
static_assert(equal(Dtype::uint8, DType::kUInt8));
static_assert(equal(Dtype::int16, DType::kInt16));
static_assert(equal(Dtype::uint16, DType::kUInt16));
static_assert(equal(Dtype::int32, DType::kInt32));
static_assert(equal(Dtype::uint32, DType::kUInt32));
static_assert(equal(Dtype::int64, DType::kInt64));
static_assert(equal(Dtype::uint64, DType::kUInt64));
static_assert(equal(Dtype::boolean, DType::kBool));
static_assert(equal(Dtype::complex64, DType::kComplex64));
static_assert(equal(Dtype::complex128, DType::kComplex128));
static_assert(equal(Dtype::complex32, DType::kComplex32));

static_assert(equal(ReduceOp::sum, RedOp::kSum));
static_assert(equal(ReduceOp::avg, RedOp::kAvg));
static_assert(equal(ReduceOp::product, RedOp::kProduct));
static_assert(equal(ReduceOp::min, RedOp::kMin));
static_assert(equal(ReduceOp::max, RedOp::kMax));
static_assert(equal(ReduceOp::band, RedOp::kBand));
static_assert(equal(ReduceOp::bor, RedOp::kBor));
static_assert(equal(ReduceOp::bxor, RedOp::kBxor));

}  // namespace
}  // namespace shoal
