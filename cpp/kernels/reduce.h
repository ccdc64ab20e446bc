// Elementwise reductions fused over several sources and destinations: the arithmetic of every collective.
//
// What is promised, because results must be equal bit for bit on all ranks and from run to run:
//   * sources are reduced in index order, element by element, without reassociation or fused
//     multiply-add, so neither the instruction set nor the slicing of a range shows in the result;
//   * float16 and bfloat16 accumulate in float32 and are rounded once, to nearest even;
//   * AVG divides once, at the end; for integers the accumulator is 64 bits wide and the quotient is
//     truncated toward zero.  Integer SUM and PRODUCT wrap;
//   * MIN and MAX give NaN if any source is NaN; of two equal zeros the earlier source's sign stays;
//   * a NaN in a result is always the canonical quiet one (hardware differs in which payload survives);
//   * bool is computed on (byte != 0) and stored as 0 or 1.
//
// Memory: addresses are aligned to the element (complex: to its parts); destinations may be identical to
// sources (in place), but must not overlap them otherwise.  Every source is read once and every
// destination written once, so a pass over large buffers runs at the speed of memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace shoal::kernels {

struct Reduction {
  DType dtype;
  RedOp op;
  uint32_t divisor = 1;  // AVG: the number of ranks
};

// All functions take counts in elements and throw std::invalid_argument if the combination of dtype and
// op is illegal, if there is no source, or if AVG has a divisor of 0.

// dsts[k][i] = finish(srcs[0][i] op srcs[1][i] op ...) for every k.
// `stream`: the destinations will not be read soon by this core, so their stores may bypass the cache.
void reduce(const Reduction& reduction, void* const* dsts, size_t ndst, const void* const* srcs, size_t nsrc,
            size_t count, bool stream);

// Bytes of one element of the accumulator: float32 for float16 and bfloat16, 64-bit integers for integer
// AVG, otherwise the dtype itself.
size_t accumulator_size(const Reduction& reduction);

// acc[i] = srcs[0][i] op srcs[1][i] op ..., in the accumulator's type, without the final division and
// rounding.  `acc` may be identical to a source of the same size.
void reduce_partial(const Reduction& reduction, void* acc, const void* const* srcs, size_t nsrc,
                    size_t count);

// acc[i] = accs[0][i] op accs[1][i] op ...: combines accumulators without finishing them.
void combine_partials(const Reduction& reduction, void* acc, const void* const* accs, size_t nacc,
                      size_t count);

// dsts[k][i] = finish(accs[0][i] op accs[1][i] op ...): AVG's division and the one rounding happen here.
void finish_partials(const Reduction& reduction, void* const* dsts, size_t ndst, const void* const* accs,
                     size_t nacc, size_t count);

// memcpy; `stream` as in reduce.
void copy(void* dst, const void* src, size_t bytes, bool stream);

// The instruction sets this build and CPU can run: levels 0 (baseline) to highest_level().  The highest is
// in use; tests force each level and compare.  Throws std::invalid_argument for a level beyond.
int highest_level();
void set_level(int level);

}  // namespace shoal::kernels
