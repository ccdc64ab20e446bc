// The driver: splits a range into blocks that fit in L1 and runs a level's kernels on each block.
//
// A block's result is computed once and then copied from L1 to the other destinations.  So each source is
// read from memory once, and no kernels for several destinations are needed.
#include "kernels/reduce.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/level.h"

namespace shoal::kernels {
namespace {

constexpr size_t kBlock = 4096;  // bytes of a block in its widest type; scratch and all streams fit in L1
constexpr size_t kLine = 64;

const Level* const kLevels[] = {
    &kBaseline,
#if defined(__x86_64__)
    &kAvx2,
    &kAvx512,
#endif
};

int detect_level() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("x86-64-v4")) return 2;
  if (__builtin_cpu_supports("x86-64-v3")) return 1;
#endif
  return 0;
}

std::atomic<const Level*>& current_level() {
  static std::atomic<const Level*> level{kLevels[highest_level()]};
  return level;
}

const Level& level() { return *current_level().load(std::memory_order_relaxed); }

Kernels find(const Reduction& reduction, size_t nsrc) {
  if (!legal(reduction.dtype, reduction.op)) {
    throw std::invalid_argument(std::string("no reduction ") + name(reduction.op) + " of " +
                                name(reduction.dtype));
  }
  if (nsrc == 0) throw std::invalid_argument("a reduction needs at least one source");
  if (reduction.op == RedOp::kAvg && reduction.divisor == 0) {
    throw std::invalid_argument("AVG needs a divisor of at least 1");
  }
  return level().find(reduction.dtype, reduction.op);
}

char* shift(void* p, size_t bytes) { return static_cast<char*>(p) + bytes; }
const char* shift(const void* p, size_t bytes) { return static_cast<const char*>(p) + bytes; }

void fence() {
#if defined(__x86_64__)
  _mm_sfence();  // streamed stores must be visible before the stores that announce them
#endif
}

// Sets the default floating-point environment during its lifetime: round to nearest even, keep subnormals.  A
// user thread may have called torch.set_flush_denormal(True), shoal's threads have not, and the result must
// not depend on which of them runs an operation.
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
#if defined(__x86_64__)
    if ((saved_ & kControl) != kDefault) _mm_setcsr(kDefault);
#endif
  }
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;
  ~DefaultArithmetic() {
#if defined(__x86_64__)
    if ((saved_ & kControl) != kDefault) _mm_setcsr(saved_);
#endif
  }

 private:
#if defined(__x86_64__)
  static constexpr unsigned kControl = 0xffc0;  // everything except the sticky exception flags
  static constexpr unsigned kDefault = 0x1f80;
  const unsigned saved_ = _mm_getcsr();
#endif
};

// Destinations of the results of blocks.  Results are computed in the first destination and copied to the
// others, or computed in scratch memory and streamed to all.
class Sink {
 public:
  Sink(Destinations dsts, bool stream) : dsts_(dsts), stream_(stream) {}
  Sink(const Sink&) = delete;
  Sink& operator=(const Sink&) = delete;
  ~Sink() {
    if (stream_) fence();
  }

  // Number of bytes before the first cache-line boundary: the length of a first block that aligns the others.
  size_t head() const { return stream_ ? -reinterpret_cast<uintptr_t>(dsts_[0]) % kLine : 0; }

  void* target(size_t offset) { return stream_ ? scratch_ : shift(dsts_[0], offset); }

  void deliver(size_t offset, size_t bytes) {
    if (stream_) {
      for (void* dst : dsts_) level().stream(shift(dst, offset), scratch_, bytes);
    } else {
      for (void* dst : dsts_.subspan(1)) memcpy(shift(dst, offset), shift(dsts_[0], offset), bytes);
    }
  }

 private:
  Destinations dsts_;
  bool stream_;
  alignas(kLine) char scratch_[kBlock];
};

// A destination that is also a source is in the cache when it is written: streaming would increase traffic.
bool in_place(Destinations dsts, Sources srcs) {
  return std::ranges::find_first_of(dsts, srcs) != dsts.end();
}

// Calls body(at, n) for consecutive ranges of at most one block; the first has `head` bytes, if not zero.
template <class Body>
void each_block(size_t count, size_t element_size, size_t widest, size_t head, Body body) {
  const size_t most = kBlock / widest;
  size_t n = head / element_size;
  if (n == 0) n = most;
  for (size_t at = 0; at < count; at += n, n = most) {
    n = std::min(n, count - at);
    body(at, n);
  }
}

// Combines a block of accumulators; returns the address of the result (`block`, or the only source).
const void* combine_block(const Kernels& kernels, void* block, Sources accs, size_t offset, size_t n) {
  if (accs.size() == 1) return shift(accs[0], offset);
  kernels.combine(block, shift(accs[0], offset), shift(accs[1], offset), n);
  for (const void* acc : accs.subspan(2)) kernels.combine(block, block, shift(acc, offset), n);
  return block;
}

}  // namespace

void reduce(const Reduction& reduction, Destinations dsts, Sources srcs, size_t count, bool stream) {
  const Kernels kernels = find(reduction, srcs.size());
  if (dsts.empty()) return;
  const DefaultArithmetic arithmetic;
  count *= kernels.parts;
  stream = stream && !in_place(dsts, srcs);
  const bool few = srcs.size() <= kMaxFused;
  const FusedKernel to_one = few ? kernels.to_one[srcs.size() - 1] : nullptr;
  const FusedKernel to_all = few && dsts.size() == srcs.size() ? kernels.to_all[srcs.size() - 1] : nullptr;
  if (!stream) {
    if (to_all) return to_all(dsts.data(), srcs.data(), count, reduction);
    if (to_one && dsts.size() == 1) return to_one(dsts.data(), srcs.data(), count, reduction);
  }
  const size_t size = kernels.element_size;
  Sink sink(dsts, stream);
  alignas(kLine) char acc[kBlock];
  each_block(count, size, std::max(size, kernels.accumulator_size), sink.head(), [&](size_t at, size_t n) {
    void* const out = sink.target(at * size);
    if (to_one) {
      const void* from[kMaxFused];
      for (size_t k = 0; k < srcs.size(); ++k) from[k] = shift(srcs[k], at * size);
      to_one(&out, from, n, reduction);
    } else {
      kernels.load(acc, shift(srcs[0], at * size), n);
      for (const void* src : srcs.subspan(1)) kernels.fold(acc, shift(src, at * size), n);
      kernels.finish(out, acc, n, reduction);
    }
    sink.deliver(at * size, n * size);
  });
}

size_t accumulator_size(const Reduction& reduction) {
  const Kernels kernels = find(reduction, 1);
  return kernels.accumulator_size * kernels.parts;
}

void reduce_partial(const Reduction& reduction, void* acc, Sources srcs, size_t count) {
  const Kernels kernels = find(reduction, srcs.size());
  const size_t size = kernels.element_size, wide = kernels.accumulator_size;
  const DefaultArithmetic arithmetic;
  alignas(kLine) char block[kBlock];
  each_block(count * kernels.parts, size, std::max(size, wide), 0, [&](size_t at, size_t n) {
    // `acc` may be one of the sources, so it is written after all have been read.
    void* const to = srcs.size() == 1 ? static_cast<void*>(shift(acc, at * wide)) : block;
    kernels.load(to, shift(srcs[0], at * size), n);
    for (const void* src : srcs.subspan(1)) kernels.fold(to, shift(src, at * size), n);
    if (to == block) memcpy(shift(acc, at * wide), block, n * wide);
  });
}

void combine_partials(const Reduction& reduction, void* acc, Sources accs, size_t count) {
  const Kernels kernels = find(reduction, accs.size());
  const size_t wide = kernels.accumulator_size;
  const DefaultArithmetic arithmetic;
  alignas(kLine) char block[kBlock];
  each_block(count * kernels.parts, wide, wide, 0, [&](size_t at, size_t n) {
    const void* const from = combine_block(kernels, block, accs, at * wide, n);
    memmove(shift(acc, at * wide), from, n * wide);
  });
}

void finish_partials(const Reduction& reduction, void* dst, Sources accs, size_t count) {
  const Kernels kernels = find(reduction, accs.size());
  const size_t size = kernels.element_size, wide = kernels.accumulator_size;
  const DefaultArithmetic arithmetic;
  alignas(kLine) char block[kBlock];
  each_block(count * kernels.parts, size, std::max(size, wide), 0, [&](size_t at, size_t n) {
    const void* const from = combine_block(kernels, block, accs, at * wide, n);
    kernels.finish(shift(dst, at * size), from, n, reduction);
  });
}

void copy(void* dst, const void* src, size_t bytes, bool stream) {
  if (bytes == 0 || dst == src) return;
  if (stream) {
    level().stream(dst, src, bytes);
    fence();
  } else {
    memcpy(dst, src, bytes);
  }
}

int highest_level() {
  static const int highest = detect_level();
  return highest;
}

void set_level(int level) {
  if (level < 0 || level > highest_level()) {
    throw std::invalid_argument("this CPU runs kernel levels 0 to " + std::to_string(highest_level()) +
                                ", not " + std::to_string(level));
  }
  current_level().store(kLevels[level], std::memory_order_relaxed);
}

}  // namespace shoal::kernels
