// A level: the kernels compiled for one instruction set.
//
// The same source (table.h) is compiled once per level with different flags; reduce.cc selects the best level
// that the CPU supports.  Most kernels process one block that fits in L1; the driver (reduce.cc), which
// exists once, handles blocks, streaming and destinations.
#pragma once

#include <cstddef>

#include "kernels/reduce.h"

namespace shoal::kernels {

inline constexpr size_t kMaxFused = 4;

using FusedKernel = void (*)(void* const* outs, const void* const* srcs, size_t n,
                             const Reduction& reduction);

// The loops for one dtype and op.  `out`, `acc` and the sources may be identical arrays.
struct Kernels {
  // outs[k] = finish(srcs[0] op ... op srcs[N-1]) for N = index + 1 sources, and one out or N outs; null if
  // there is no such loop.  Only these kernels accept more than a block.
  FusedKernel to_one[kMaxFused];
  FusedKernel to_all[kMaxFused];
  // acc = src, converted to the accumulator's type.
  void (*load)(void* acc, const void* src, size_t n);
  // acc = acc op src, with the same conversion.
  void (*fold)(void* acc, const void* src, size_t n);
  // acc = a op b, all three accumulators.
  void (*combine)(void* acc, const void* a, const void* b, size_t n);
  // out = acc, divided and rounded.
  void (*finish)(void* out, const void* acc, size_t n, const Reduction& reduction);
  size_t element_size;      // bytes of the kernel's unit: an element, or one part of a complex element
  size_t accumulator_size;  // bytes of this unit in the accumulator
  size_t parts;             // units per element
};

struct Level {
  // The kernels of a legal combination.
  Kernels (*find)(DType dtype, RedOp op);
  // memcpy with stores that bypass the cache; they are not ordered before later stores until a store fence.
  void (*stream)(void* dst, const void* src, size_t bytes);
};

extern const Level kBaseline;
#if defined(__x86_64__)
extern const Level kAvx2;
extern const Level kAvx512;
#endif

}  // namespace shoal::kernels
