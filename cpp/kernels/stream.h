// Copies with stores that bypass the cache, in the widest stores of the level.  Compiled once per level.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shoal::kernels {
namespace {

#if defined(__AVX512F__)
constexpr size_t kStore = 64;
void stream_one(char* to, const char* from) { _mm512_stream_si512((__m512i*)to, _mm512_loadu_si512(from)); }
#elif defined(__AVX2__)
constexpr size_t kStore = 32;
void stream_one(char* to, const char* from) {
  _mm256_stream_si256((__m256i*)to, _mm256_loadu_si256((const __m256i_u*)from));
}
#elif defined(__x86_64__)
constexpr size_t kStore = 16;
void stream_one(char* to, const char* from) {
  _mm_stream_si128((__m128i*)to, _mm_loadu_si128((const __m128i_u*)from));
}
#endif

void stream(void* dst, const void* src, size_t bytes) {
  auto* to = static_cast<char*>(dst);
  auto* from = static_cast<const char*>(src);
#if defined(__x86_64__)
  constexpr size_t kLine = 64;  // only whole lines are written without being read first
  size_t head = -reinterpret_cast<uintptr_t>(to) % kLine;
  if (head > bytes) head = bytes;
  memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) {
    for (size_t i = 0; i < kLine; i += kStore) stream_one(to + i, from + i);
  }
#endif
  memcpy(to, from, bytes);
}

}  // namespace
}  // namespace shoal::kernels
