#include "frontend/reports.h"

#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <mutex>
#include <set>
#include <utility>

#include "common/clock.h"
#include "frontend/inherited.h"

namespace shoal::frontend_core {
namespace {

constexpr std::size_t kMaxRanks = 64, kMaxReports = 12;

// An encoder of the few types of MessagePack that a report has.
struct Packer {
  std::string bytes;
  void byte(int value) { bytes += static_cast<char>(value); }
  template <class Number>
  void number(int code, Number value) {
    byte(code);
    for (int shift = 8 * (sizeof value - 1); shift >= 0; shift -= 8)
      byte(static_cast<int>(value >> shift & 0xff));
  }
  void text(const char* value) {
    const std::string given = value;  // shorter than 32
    byte(0xa0 | static_cast<int>(given.size()));
    bytes += given;
  }
};

void report(const char* kind, const std::vector<int>& ranks) {
  // Never destroyed: groups may be closed by destructors of static objects.
  static auto& mutex = *new std::mutex;
  static auto& reported = *new std::set<std::pair<std::string, std::vector<int>>>;
  const std::lock_guard lock(mutex);
  const int fd = inherited_socket("SHOAL_REPORT_FD");
  if (fd < 0 || reported.size() >= kMaxReports || !reported.emplace(kind, ranks).second) return;
  Packer packer;
  packer.byte(0x80 | 3);  // a map of three fields
  packer.text("kind");
  packer.text(kind);
  packer.text("at");
  packer.number(0xcb, std::bit_cast<std::uint64_t>(static_cast<double>(now_ns()) * 1e-9));
  packer.text("ranks");
  const std::size_t count = std::min(ranks.size(), kMaxRanks);
  packer.number(0xdc, static_cast<std::uint16_t>(count));
  for (std::size_t i = 0; i < count; ++i) packer.number(0xce, static_cast<std::uint32_t>(ranks[i]));
  [[maybe_unused]] const auto sent =
      ::send(fd, packer.bytes.data(), packer.bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

void report_left() { report("left", {}); }

void report_told(const std::vector<int>& ranks) { report("told", ranks); }

}  // namespace shoal::frontend_core
