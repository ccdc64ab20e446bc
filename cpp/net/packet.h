// Layout of a packet's payload: a table with an entry per part, the head, then the inline parts, aligned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "net/frame.h"

namespace shoal::layout {

struct Entry {
  std::uint64_t bytes = 0;
  std::uint64_t place = 0;  // kInside or kApart
};

constexpr std::uint64_t kInside = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kApart = kInside - 1;
constexpr std::size_t kAlignment = 16;

constexpr std::uint64_t aligned(std::uint64_t at) { return (at + kAlignment - 1) / kAlignment * kAlignment; }

inline std::uint64_t head_at(const PacketFields& packet) { return packet.parts * sizeof(Entry); }

}  // namespace shoal::layout
