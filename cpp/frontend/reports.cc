#include "frontend/reports.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <set>
#include <utility>

#include "common/clock.h"
#include "frontend/inherited.h"
#include "frontend/packer.h"

namespace shoal::frontend_core {
namespace {

constexpr std::size_t kMaxRanks = 64, kMaxReports = 12;

// A WaitSummary of src/shoal/failure_report.py, with the first `late` members.
void pack(Packer& packer, const StatisticsValues& values, double seconds, std::size_t late) {
  packer.text("summary");
  packer.array(7);
  packer.real(seconds);
  packer.integer(values.completed);
  packer.integer(values.bytes);
  packer.real(static_cast<double>(values.waited) * 1e-9);
  packer.real(std::max(latency::quantile(values.latencies, 0.5), 0.0) * 1e-9);
  packer.real(std::max(latency::quantile(values.latencies, 0.99), 0.0) * 1e-9);
  packer.array(late);
  for (std::size_t i = 0; i < late; ++i) {
    packer.array(2);
    packer.integer(values.late[i].times);
    packer.real(static_cast<double>(values.late[i].waited) * 1e-9);
  }
}

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
  packer.map(summary == nullptr ? 3 : 4);
  packer.text("kind");
  packer.text(kind);
  packer.text("at");
  packer.real(static_cast<double>(now_ns()) * 1e-9);
  packer.text("ranks");
  const std::size_t count = std::min(ranks.size(), kMaxRanks);
  packer.array(count);
  for (std::size_t i = 0; i < count; ++i) packer.integer(static_cast<std::uint64_t>(ranks[i]));
  if (summary != nullptr) pack(packer, *summary, seconds, count);
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
