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
  void real(double value) { number(0xcb, std::bit_cast<std::uint64_t>(value)); }
  // A WaitSummary of src/shoal/failure_report.py, with the first `late` members.
  void summary(const StatisticsValues& values, double seconds, std::size_t late) {
    text("summary");
    byte(0x90 | 7);  // an array of seven fields
    real(seconds);
    number(0xcf, values.completed);
    number(0xcf, values.bytes);
    real(static_cast<double>(values.waited) * 1e-9);
    real(std::max(latency::quantile(values.latencies, 0.5), 0.0) * 1e-9);
    real(std::max(latency::quantile(values.latencies, 0.99), 0.0) * 1e-9);
    number(0xdc, static_cast<std::uint16_t>(late));
    for (std::size_t i = 0; i < late; ++i) {
      byte(0x90 | 2);
      number(0xcf, values.late[i].times);
      real(static_cast<double>(values.late[i].waited) * 1e-9);
    }
  }
  void text(const char* value) {
    const std::string given = value;  // shorter than 32
    byte(0xa0 | static_cast<int>(given.size()));
    bytes += given;
  }
};

// Packs `summary`, the field of a summary, if it is not null.
void report(const char* kind, const std::vector<int>& ranks, const StatisticsValues* summary = nullptr,
            double seconds = 0) {
  // Never destroyed: groups may be closed by destructors of static objects.
  static auto& mutex = *new std::mutex;
  static auto& reported = *new std::set<std::pair<std::string, std::vector<int>>>;
  const std::lock_guard lock(mutex);
  const int fd = inherited_socket("SHOAL_REPORT_FD");
  if (fd < 0 || reported.size() >= kMaxReports || !reported.emplace(kind, ranks).second) return;
  Packer packer;
  packer.byte(0x80 | (summary == nullptr ? 3 : 4));  // a map of 3 or 4 fields
  packer.text("kind");
  packer.text(kind);
  packer.text("at");
  packer.real(static_cast<double>(now_ns()) * 1e-9);
  packer.text("ranks");
  const std::size_t count = std::min(ranks.size(), kMaxRanks);
  packer.number(0xdc, static_cast<std::uint16_t>(count));
  for (std::size_t i = 0; i < count; ++i) packer.number(0xce, static_cast<std::uint32_t>(ranks[i]));
  if (summary != nullptr) packer.summary(*summary, seconds, count);
  [[maybe_unused]] const auto sent =
      ::send(fd, packer.bytes.data(), packer.bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

void report_left() { report("left", {}); }

void report_told(const std::vector<int>& ranks) { report("told", ranks); }

void report_summary(const StatisticsValues& totals, double seconds) {
  constexpr std::size_t kMaxLate = 16;  // as in failure_report.py
  std::vector<int> late;
  for (const LateMember& member : totals.late)
    if (late.size() < kMaxLate) late.push_back(member.rank);
  report("summary", late, &totals, seconds);
}

}  // namespace shoal::frontend_core
