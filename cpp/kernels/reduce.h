// Elementwise reductions fused over several sources and destinations: the arithmetic of all collectives.
//
// Guarantees, because results must be bitwise equal on all ranks and in repeated runs:
//   * Sources are reduced in index order, element by element, without reassociation or fused multiply-add, so
//     the result depends neither on the instruction set nor on how a range is split.
//   * float16 and bfloat16 accumulate in float32 and are rounded once, to nearest even.
//   * AVG divides once, at the end.  For integers the accumulator has 64 bits and the quotient is truncated
//     toward zero.  Integer SUM and PRODUCT wrap.
//   * MIN and MAX return NaN if any source is NaN; of two equal zeros, the earlier source's sign remains.
//   * A NaN in a result is always the canonical quiet NaN (CPUs differ in the payload that they keep).
//   * bool is computed as (byte != 0) and stored as 0 or 1.
//
// Addresses are aligned to the element (complex: to its parts).  Destinations may be identical to sources (in
// place), but must not overlap them otherwise.  Every source is read once and every destination is written
// once, so large buffers are processed at memory bandwidth.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/types.h"

namespace shoal::kernels {

struct Reduction {
  DType dtype;
  RedOp op;
  uint32_t divisor = 1;  // AVG: the number of ranks
};

using Destinations = std::span<void* const>;
using Sources = std::span<const void* const>;

// Counts are in elements.  All functions throw std::invalid_argument for an illegal combination of dtype and
// op, for a reduction without a source, and for AVG with a divisor of 0.

// dsts[k][i] = finish(srcs[0][i] op srcs[1][i] op ...) for every k.
// `stream`: this core will not read the destinations soon, so the stores may bypass the cache.
void reduce(const Reduction& reduction, Destinations dsts, Sources srcs, size_t count, bool stream = false);

// Bytes of one accumulator element: float32 for float16 and bfloat16, 64-bit integers for integer
// AVG, otherwise the dtype itself.
size_t accumulator_size(const Reduction& reduction);

// acc[i] = srcs[0][i] op srcs[1][i] op ..., in the accumulator's type, before the final division and
// rounding.  `acc` may be identical to a source of the same size.
void reduce_partial(const Reduction& reduction, void* acc, Sources srcs, size_t count);

// acc[i] = accs[0][i] op accs[1][i] op ..., before the final division and rounding.
void combine_partials(const Reduction& reduction, void* acc, Sources accs, size_t count);

// dst[i] = finish(accs[0][i] op accs[1][i] op ...), including AVG's division and the only rounding.
void finish_partials(const Reduction& reduction, void* dst, Sources accs, size_t count);

// memcpy; `stream` as in reduce.
void copy(void* dst, const void* src, size_t bytes, bool stream = false);

// This build and CPU support the kernel levels 0 (baseline) to highest_level(), which is the default.  Tests
// select each level and compare.  set_level throws std::invalid_argument for an unsupported level.
int highest_level();
void set_level(int level);

}  // namespace shoal::kernels
