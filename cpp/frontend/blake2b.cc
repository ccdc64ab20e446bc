#include "frontend/blake2b.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace shoal::frontend_core {
namespace {

constexpr std::uint64_t kStart[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                                     0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                                     0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

constexpr std::uint8_t kSigma[10][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                         {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                         {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                         {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                         {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                         {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                         {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                         {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                         {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                         {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

constexpr std::uint8_t kColumns[8][4] = {{0, 4, 8, 12},  {1, 5, 9, 13},  {2, 6, 10, 14}, {3, 7, 11, 15},
                                         {0, 5, 10, 15}, {1, 6, 11, 12}, {2, 7, 8, 13},  {3, 4, 9, 14}};

void compress(std::uint64_t (&state)[8], const unsigned char* block, std::uint64_t length, bool last) {
  static_assert(std::endian::native == std::endian::little);
  std::uint64_t m[16], v[16];
  std::memcpy(m, block, sizeof m);
  std::copy_n(state, 8, v);
  std::copy_n(kStart, 8, v + 8);
  v[12] ^= length;
  if (last) v[14] = ~v[14];
  for (int round = 0; round < 12; ++round) {
    const auto& sigma = kSigma[round % 10];
    for (int i = 0; i < 8; ++i) {
      auto &a = v[kColumns[i][0]], &b = v[kColumns[i][1]], &c = v[kColumns[i][2]], &d = v[kColumns[i][3]];
      a += b + m[sigma[2 * i]];
      d = std::rotr(d ^ a, 32);
      c += d;
      b = std::rotr(b ^ c, 24);
      a += b + m[sigma[2 * i + 1]];
      d = std::rotr(d ^ a, 16);
      c += d;
      b = std::rotr(b ^ c, 63);
    }
  }
  for (int i = 0; i < 8; ++i) state[i] ^= v[i] ^ v[i + 8];
}

}  // namespace

void blake2b(std::string_view data, std::string_view person, unsigned char* digest, std::size_t digest_size) {
  std::uint64_t state[8];
  std::copy_n(kStart, 8, state);
  state[0] ^= 0x01010000 ^ digest_size;
  unsigned char name[16] = {};
  std::copy_n(person.begin(), std::min(person.size(), sizeof name), name);
  for (int i = 0; i < 2; ++i) {
    std::uint64_t word;
    std::memcpy(&word, name + 8 * i, sizeof word);
    state[6 + i] ^= word;
  }
  unsigned char block[128];
  std::size_t at = 0;
  do {
    const std::size_t bytes = std::min(data.size() - at, sizeof block);
    std::memset(block, 0, sizeof block);
    std::copy_n(data.begin() + static_cast<std::ptrdiff_t>(at), bytes, block);
    at += bytes;
    compress(state, block, at, at == data.size());
  } while (at < data.size());
  std::memcpy(digest, state, digest_size);
}

std::uint64_t digest64(std::string_view data, std::string_view person) {
  std::uint64_t result;
  blake2b(data, person, reinterpret_cast<unsigned char*>(&result), sizeof result);
  return result;
}

}  // namespace shoal::frontend_core
