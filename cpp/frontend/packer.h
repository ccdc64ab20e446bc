// An encoder of the few types of MessagePack that Python gets from C++ programs.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

namespace shoal::frontend_core {

struct Packer {
  std::string bytes;

  void byte(int value) { bytes += static_cast<char>(value); }
  // A value after the code of its type, or a length after that of its container.
  template <class Number>
  void number(int code, Number value) {
    byte(code);
    for (int shift = 8 * (sizeof value - 1); shift >= 0; shift -= 8)
      byte(static_cast<int>(value >> shift & 0xff));
  }
  void integer(std::uint64_t value) { number(0xcf, value); }
  void real(double value) { number(0xcb, std::bit_cast<std::uint64_t>(value)); }
  void boolean(bool value) { byte(value ? 0xc3 : 0xc2); }
  void text(std::string_view value) {  // UTF-8
    number(0xdb, static_cast<std::uint32_t>(value.size()));
    bytes += value;
  }
  void map(int fields) { byte(0x80 | fields); }  // fewer than 16
  void array(std::size_t items) { number(0xdd, static_cast<std::uint32_t>(items)); }
};

}  // namespace shoal::frontend_core
