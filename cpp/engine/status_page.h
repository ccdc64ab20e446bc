// The state of a rank for other processes of the user: its groups, their operations and whom they wait for.
//
// The page is in the rank's shared memory.  The watch thread writes it every few milliseconds, so it costs
// operations nothing, and the program need not cooperate: `shoal top` reads it through /proc, also while the
// rank hangs or is stopped.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/statistics.h"
#include "net/frame.h"

namespace shoal {

constexpr std::uint64_t kStatusMagic = 0x7375746174536f68ULL;  // "hoStatus"
constexpr std::uint32_t kStatusVersion = 3;
constexpr std::size_t kStatusGroups = 32, kStatusLate = 16, kStatusText = 64;

struct StatusLate {
  std::uint64_t times = 0, waited = 0;
  std::int32_t rank = -1;  // of the page's ranks; -1: no entry
  std::int32_t unused = 0;
};

struct StatusGroup {
  char name[kStatusText] = {};  // UTF-8; ends with a zero
  std::uint64_t ident = 0;
  std::int32_t rank = 0, size = 1;
  std::uint64_t pending = 0;
  OperationCounts counters;  // with waits that have not ended when the page is written
  // The foremost pending operation, see Lanes::pending_at; empty: none.
  char call[kStatusText] = {};
  std::int64_t number = -1;   // -1: it has none
  std::int64_t since = 0;     // when it was submitted: CLOCK_MONOTONIC, nanoseconds
  std::int32_t blocker = -1;  // the rank of the page's ranks that it needs now; -1: none, or unknown
  std::int32_t waits = 0;     // 1: because that has not called it; 0: because of its data
  StatusLate late[kStatusLate];
  std::uint64_t latencies[latency::kBuckets] = {};
};

// The report of a rank on another host about itself, as the payload of its heartbeats.
struct RemoteStatus {
  std::uint64_t completed = 0, bytes = 0, waited = 0;  // as in OperationCounts, of all groups
  std::uint64_t memory = 0;
  std::int64_t number = -1;   // of its foremost pending operation; -1: it has none
  std::int64_t age = -1;      // nanoseconds since that was submitted; -1: nothing is pending
  std::int32_t blocker = -1;  // as in StatusGroup
  std::int32_t pid = 0;
  Kind kind{};             // of that operation
  std::uint8_t waits = 0;  // as in StatusGroup
  std::uint8_t unused[2] = {};
  std::uint32_t world = 0;  // low bits of its page's `started`: tells the worlds of a process apart
};
static_assert(sizeof(RemoteStatus) == kReportBytes);

struct StatusRemote {
  std::uint32_t sequence = 0;  // odd while `received` and `status` are written
  std::int32_t alive = 0;      // 0: it has left or is lost
  std::int64_t received = 0;   // when its last report came; 0: it is on this host, or has not reported yet
  RemoteStatus status;
};

struct StatusPage {
  std::uint64_t magic = kStatusMagic;
  std::uint32_t version = kStatusVersion;
  std::uint32_t count = 0;                 // of the entries in `groups`
  std::atomic<std::uint64_t> sequence{0};  // odd while the page is written
  std::int64_t pid = 0;
  // The process of the lowest rank among those that share memory, equal for all of these; 0: there are no
  // others.  It tells jobs of one name apart.
  std::int64_t leader = 0;
  std::int32_t rank = 0, size = 1;  // of this process among those it is connected to
  char job[kStatusText] = {};
  std::int64_t started = 0, written = 0;  // CLOCK_MONOTONIC, nanoseconds
  std::uint64_t memory = 0;               // bytes of shared memory in use
  std::uint64_t closed = 0;               // 1: the rank has closed its connections
  std::uint64_t worlds = 0;               // contexts that its process has made so far, without their parts
  OperationCounts ended;                  // of groups that all members have closed, or that have no entry
  std::uint64_t ended_latencies[latency::kBuckets] = {};
  std::uint64_t remote = 0;  // offset of a StatusRemote for each rank; 0: none is on another host
  StatusGroup groups[kStatusGroups];
};

// Reads the page of the process whose memory `fd` is.  False if it is not the memory of a rank of this
// release.  Numbers are within their limits and texts end with a zero, whatever the process wrote.
bool read_status(int fd, StatusPage& page);
// The reports of the other ranks, by rank; empty if all are on this host.
std::vector<StatusRemote> read_remote(int fd, const StatusPage& page);

void copy_text(char (&to)[kStatusText], const std::string& text);

}  // namespace shoal
