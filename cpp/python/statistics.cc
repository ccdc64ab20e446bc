// Counters of groups, and the status pages of other processes (shoal.statistics, shoal.rank_status).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "engine/context.h"
#include "engine/describe.h"
#include "engine/status_page.h"
#include "python/bindings.h"
#include "python/text.h"

namespace nb = nanobind;
using namespace shoal;

namespace {

struct PendingCall {
  nb::object text;
  std::int64_t number, since;
  int blocker;
  bool waits;
};

struct GroupStatus {
  nb::object name;
  std::uint64_t ident;
  int rank, size;
  std::uint64_t pending;
  StatisticsValues statistics;
  std::optional<PendingCall> call;
};

// The last report of a rank on another host.
struct RemoteRank {
  int rank;
  bool alive;
  std::int64_t received;
  RemoteStatus status;
};

struct RankStatus {
  nb::object job;
  std::int64_t pid, leader;
  int rank, size;
  std::int64_t started, written;
  std::uint64_t memory;
  bool closed;
  std::uint64_t worlds;
  StatisticsValues ended;
  std::vector<GroupStatus> groups;
  std::vector<RemoteRank> remote;
};

StatisticsValues values_of(const StatusCounters& counters) {
  StatisticsValues values;
  values.completed = counters.completed;
  values.failed = counters.failed;
  values.bytes = counters.bytes;
  values.waits = counters.waits;
  values.waited = counters.waited;
  return values;
}

GroupStatus group_status(const StatusGroup& entry) {
  GroupStatus status{str(entry.name), entry.ident, entry.rank, entry.size, entry.pending, {}, {}};
  status.statistics = values_of(entry.counters);
  for (const StatusLate& late : entry.late)
    if (late.rank >= 0) status.statistics.late.push_back({late.rank, late.times, late.waited});
  std::ranges::copy(entry.latencies, status.statistics.latencies.begin());
  if (entry.call[0] != 0)
    status.call = {str(entry.call), entry.number, entry.since, entry.blocker, entry.waits != 0};
  return status;
}

std::optional<RankStatus> status_of(int fd) {
  auto page = std::make_unique<StatusPage>();
  if (!read_status(fd, *page)) return std::nullopt;
  RankStatus status;
  status.job = str(page->job);
  status.pid = page->pid;
  status.leader = page->leader;
  status.rank = page->rank;
  status.size = page->size;
  status.started = page->started;
  status.written = page->written;
  status.memory = page->memory;
  status.closed = page->closed != 0;
  status.worlds = page->worlds;
  status.ended = values_of(page->ended);
  std::ranges::copy(page->ended_latencies, status.ended.latencies.begin());
  for (std::uint32_t i = 0; i < page->count; ++i) status.groups.push_back(group_status(page->groups[i]));
  const auto remote = read_remote(fd, *page);
  for (std::size_t rank = 0; rank < remote.size(); ++rank)
    if (remote[rank].received != 0)
      status.remote.push_back(
          {static_cast<int>(rank), remote[rank].alive != 0, remote[rank].received, remote[rank].status});
  return status;
}

}  // namespace

void bind_statistics(nb::module_& m) {
  nb::class_<LateMember>(m, "LateMember")
      .def_ro("rank", &LateMember::rank)
      .def_ro("times", &LateMember::times)
      .def_ro("waited", &LateMember::waited);
  nb::class_<StatisticsValues>(m, "Statistics")
      .def_ro("completed", &StatisticsValues::completed)
      .def_ro("failed", &StatisticsValues::failed)
      .def_ro("bytes", &StatisticsValues::bytes)
      .def_ro("waits", &StatisticsValues::waits)
      .def_ro("waited", &StatisticsValues::waited)
      .def_ro("late", &StatisticsValues::late)
      .def_ro("latencies", &StatisticsValues::latencies);
  nb::class_<PendingCall>(m, "PendingCall")
      .def_ro("text", &PendingCall::text)
      .def_ro("number", &PendingCall::number)
      .def_ro("since", &PendingCall::since)
      .def_ro("blocker", &PendingCall::blocker)
      .def_ro("waits", &PendingCall::waits);
  nb::class_<GroupStatus>(m, "GroupStatus")
      .def_ro("name", &GroupStatus::name)
      .def_ro("ident", &GroupStatus::ident)
      .def_ro("rank", &GroupStatus::rank)
      .def_ro("size", &GroupStatus::size)
      .def_ro("pending", &GroupStatus::pending)
      .def_ro("statistics", &GroupStatus::statistics)
      .def_ro("call", &GroupStatus::call);
  nb::class_<RemoteRank>(m, "RemoteRank")
      .def_ro("rank", &RemoteRank::rank)
      .def_ro("alive", &RemoteRank::alive)
      .def_ro("received", &RemoteRank::received)
      .def_prop_ro("pid", [](const RemoteRank& rank) { return rank.status.pid; })
      .def_prop_ro("world", [](const RemoteRank& rank) { return rank.status.world; })
      .def_prop_ro("completed", [](const RemoteRank& rank) { return rank.status.completed; })
      .def_prop_ro("bytes", [](const RemoteRank& rank) { return rank.status.bytes; })
      .def_prop_ro("waited", [](const RemoteRank& rank) { return rank.status.waited; })
      .def_prop_ro("memory", [](const RemoteRank& rank) { return rank.status.memory; })
      .def_prop_ro("kind", [](const RemoteRank& rank) { return name(rank.status.kind); })
      .def_prop_ro("number", [](const RemoteRank& rank) { return rank.status.number; })
      .def_prop_ro("age", [](const RemoteRank& rank) { return rank.status.age; })
      .def_prop_ro("blocker", [](const RemoteRank& rank) { return rank.status.blocker; })
      .def_prop_ro("waits", [](const RemoteRank& rank) { return rank.status.waits != 0; });
  nb::class_<RankStatus>(m, "RankStatus")
      .def_ro("job", &RankStatus::job)
      .def_ro("pid", &RankStatus::pid)
      .def_ro("leader", &RankStatus::leader)
      .def_ro("rank", &RankStatus::rank)
      .def_ro("size", &RankStatus::size)
      .def_ro("started", &RankStatus::started)
      .def_ro("written", &RankStatus::written)
      .def_ro("memory", &RankStatus::memory)
      .def_ro("closed", &RankStatus::closed)
      .def_ro("worlds", &RankStatus::worlds)
      .def_ro("ended", &RankStatus::ended)
      .def_ro("groups", &RankStatus::groups)
      .def_ro("remote", &RankStatus::remote);
  m.def("read_status", &status_of, nb::arg("fd"));
  m.def("latency_quantile", &latency::quantile, nb::arg("counts"), nb::arg("share"));
  nb::list least;
  for (int bucket = 0; bucket < latency::kBuckets; ++bucket) least.append(latency::least(bucket));
  m.attr("LATENCIES") = nb::tuple(least);
}
