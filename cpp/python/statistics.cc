// Counters of groups, and the status pages of other processes (shoal.statistics, shoal.rank_status).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "engine/context.h"
#include "engine/describe.h"
#include "engine/status_page.h"
#include "python/bindings.h"

namespace nb = nanobind;
using namespace shoal;

namespace {

struct PendingCall {
  nb::object text;
  std::int64_t number, since;
  int blocker;
  bool waits;
};

// The last report of a rank on another host.
struct RemoteRank : StatusRemote {
  int rank = 0;
};

struct RankStatus : StatusPage {
  std::vector<RemoteRank> reports;
};

StatisticsValues statistics_of(const OperationCounts& counts,
                               const std::uint64_t (&latencies)[latency::kBuckets]) {
  StatisticsValues values;
  static_cast<OperationCounts&>(values) = counts;
  std::ranges::copy(latencies, values.latencies.begin());
  return values;
}

StatisticsValues group_statistics(const StatusGroup& group) {
  StatisticsValues values = statistics_of(group.counters, group.latencies);
  for (const StatusLate& late : group.late)
    if (late.rank >= 0) values.late.push_back({late.rank, late.times, late.waited});
  return values;
}

std::optional<PendingCall> pending_call(const StatusGroup& group) {
  if (group.call[0] == 0) return std::nullopt;
  return PendingCall{str(group.call), group.number, group.since, group.blocker, group.waits != 0};
}

// Null: the descriptor is not that of the memory of a rank.
std::unique_ptr<RankStatus> status_of(int fd) {
  auto status = std::make_unique<RankStatus>();
  if (!read_status(fd, *status)) return nullptr;
  int rank = 0;
  for (const StatusRemote& remote : read_remote(fd, *status)) {
    if (remote.received != 0) status->reports.push_back({remote, rank});
    ++rank;
  }
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
  nb::class_<StatusGroup>(m, "GroupStatus")
      .def_prop_ro("name", [](const StatusGroup& group) { return str(group.name); })
      .def_ro("ident", &StatusGroup::ident)
      .def_ro("rank", &StatusGroup::rank)
      .def_ro("size", &StatusGroup::size)
      .def_ro("pending", &StatusGroup::pending)
      .def_prop_ro("statistics", &group_statistics)
      .def_prop_ro("call", &pending_call);
  nb::class_<RemoteRank>(m, "RemoteRank")
      .def_ro("rank", &RemoteRank::rank)
      .def_prop_ro("alive", [](const RemoteRank& rank) { return rank.alive != 0; })
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
      .def_prop_ro("job", [](const RankStatus& rank) { return str(rank.job); })
      .def_ro("pid", &RankStatus::pid)
      .def_ro("leader", &RankStatus::leader)
      .def_ro("rank", &RankStatus::rank)
      .def_ro("size", &RankStatus::size)
      .def_ro("started", &RankStatus::started)
      .def_ro("written", &RankStatus::written)
      .def_ro("memory", &RankStatus::memory)
      .def_prop_ro("closed", [](const RankStatus& rank) { return rank.closed != 0; })
      .def_ro("worlds", &RankStatus::worlds)
      .def_prop_ro("ended",
                   [](const RankStatus& rank) { return statistics_of(rank.ended, rank.ended_latencies); })
      .def_prop_ro("groups",
                   [](const RankStatus& rank) { return std::vector(rank.groups, rank.groups + rank.count); })
      .def_ro("remote", &RankStatus::reports);
  m.def("read_status", &status_of, nb::arg("fd"));
  m.def("latency_quantile", &latency::quantile, nb::arg("counts"), nb::arg("share"));
  nb::list least;
  for (int bucket = 0; bucket < latency::kBuckets; ++bucket) least.append(latency::least(bucket));
  m.attr("LATENCIES") = nb::tuple(least);
}
