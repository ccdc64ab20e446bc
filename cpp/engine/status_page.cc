#include "engine/status_page.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "engine/context.h"
#include "engine/describe.h"
#include "net/check.h"

namespace shoal {
namespace {

constexpr int kAttempts = 50;  // to read a page that is being written
constexpr int kMaxRanks = 1 << 16;
constexpr std::uint64_t kMaxCount = 1ULL << 48;  // so that sums over groups have 64 bits

bool read_at(int fd, void* to, std::size_t bytes, std::uint64_t offset) {
  return pread(fd, to, bytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes);
}

void add_late(std::vector<LateMember>& sum, const LateMember& more) {
  auto found = std::ranges::find(sum, more.rank, &LateMember::rank);
  if (found == sum.end()) found = sum.insert(found, {.rank = more.rank});
  found->times += more.times;
  found->waited += more.waited;
}

// Without the late members.
void add_counts(StatisticsValues& sum, const StatisticsValues& more) {
  sum.completed += more.completed;
  sum.failed += more.failed;
  sum.bytes += more.bytes;
  sum.waits += more.waits;
  sum.waited += more.waited;
  for (std::size_t i = 0; i < sum.latencies.size(); ++i) sum.latencies[i] += more.latencies[i];
}

void add_all(StatisticsValues& sum, const StatisticsValues& more) {
  add_counts(sum, more);
  for (const LateMember& late : more.late) add_late(sum.late, late);
}

// The counters of a group, whose members have their ranks in the world.
StatisticsValues values_in_world(Group& group) {
  StatisticsValues values = group.lanes().statistics();
  for (LateMember& late : values.late) late.rank = group.world_rank(late.rank);
  return values;
}

void limit(OperationCounts& counters, std::uint64_t (&latencies)[latency::kBuckets]) {
  for (std::uint64_t* count : {&counters.completed, &counters.failed, &counters.waits})
    *count = std::min(*count, kMaxCount);
  for (std::uint64_t& count : latencies) count = std::min(count, kMaxCount);
}

bool is_plausible(StatusGroup& group, int ranks) {
  group.name[kStatusText - 1] = group.call[kStatusText - 1] = 0;
  if (group.size < 1 || group.rank < 0 || group.rank >= group.size) return false;
  limit(group.counters, group.latencies);
  if (group.blocker >= ranks) group.blocker = -1;
  for (StatusLate& late : group.late)
    if (late.rank >= ranks) late.rank = -1;
  return true;
}

}  // namespace

void copy_text(char (&to)[kStatusText], const std::string& text) {
  const std::size_t bytes = clipped(text.data(), text.size(), kStatusText - 1);
  std::memcpy(to, text.data(), bytes);
  std::memset(to + bytes, 0, kStatusText - bytes);
}

// The counters of a group, and what it does.
struct Observed {
  std::shared_ptr<Group> group;
  StatisticsValues values;
  Lanes::Pending pending;

  Observed(std::shared_ptr<Group> of, std::int64_t now)
      : group(std::move(of)), values(values_in_world(*group)), pending(group->lanes().pending_at(now)) {
    for (const LateMember& wait : pending.waits) {
      values.waited += wait.waited;
      if (wait.rank >= 0) add_late(values.late, {group->world_rank(wait.rank), wait.times, wait.waited});
    }
    values.sort_late();
  }
};

void write_entry(const Observed& observed, StatusGroup& entry) {
  const Group& group = *observed.group;
  const StatisticsValues& values = observed.values;
  copy_text(entry.name, group.name());
  entry.ident = group.ident();
  entry.rank = group.rank();
  entry.size = group.size();
  entry.counters = values;
  entry.pending = observed.pending.count;
  const OperationPtr& call = observed.pending.foremost.operation;
  copy_text(entry.call, !call                          ? ""
                        : call->request().collective() ? describe(call->call())
                                                       : describe(call->request()));
  entry.number = call && call->request().numbered() ? static_cast<std::int64_t>(call->request().channel) : -1;
  entry.since = call ? call->submitted() : 0;
  const int blocker = call ? call->other_blocker() : -1;
  entry.blocker = blocker < 0 ? -1 : group.world_rank(blocker);
  entry.waits = call && call->waits_since() != 0 ? 1 : 0;
  for (std::size_t i = 0; i < kStatusLate; ++i) {
    entry.late[i] = {};
    if (i < values.late.size())
      entry.late[i] = {values.late[i].times, values.late[i].waited, values.late[i].rank};
  }
  std::ranges::copy(values.latencies, entry.latencies);
}

// Readers of other processes see that a page is incomplete by its sequence number.
void Context::write_status(std::int64_t now) {
  if (options_.world != nullptr) return;  // the world has the page
  StatisticsValues rest;
  std::vector<Observed> observed;
  for (auto& group : counted_groups(rest)) observed.emplace_back(std::move(group), now);
  if (observed.size() > kStatusGroups) {  // groups with pending operations get the places
    std::ranges::stable_partition(observed, [](const Observed& each) { return each.pending.count > 0; });
    for (std::size_t i = kStatusGroups; i < observed.size(); ++i) add_counts(rest, observed[i].values);
    observed.erase(observed.begin() + kStatusGroups, observed.end());
  }
  StatusPage& page = *status_;
  const std::uint64_t sequence = page.sequence.load(std::memory_order_relaxed);
  page.sequence.store(sequence + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  page.count = static_cast<std::uint32_t>(observed.size());
  for (std::uint32_t i = 0; i < page.count; ++i) write_entry(observed[i], page.groups[i]);
  page.written = now;
  page.memory = arena_->in_use();
  page.closed = closed() ? 1 : 0;
  page.worlds = worlds_made_.load();
  for (int rank = 0; remote_ != nullptr && rank < options_.size; ++rank)
    remote_[rank].alive = peers_.state(rank) == Peers::kAlive ? 1 : 0;
  page.ended = rest;
  std::ranges::copy(rest.latencies, page.ended_latencies);
  page.sequence.store(sequence + 2, std::memory_order_release);
}

// The report of this rank for the others.
RemoteStatus Context::remote_status(std::int64_t now) {
  RemoteStatus status;
  if (options_.world != nullptr) return status;  // the world reports
  Lanes::Foremost found;
  StatisticsValues sum;
  for (auto& group : counted_groups(sum)) {
    add_counts(sum, group->lanes().statistics());
    const Lanes::Pending pending = group->lanes().pending_at(now);
    for (const LateMember& wait : pending.waits) sum.waited += wait.waited;
    found.consider(pending.foremost.operation, pending.foremost.awaited);
  }
  status.completed = sum.completed;
  status.bytes = sum.bytes;
  status.waited = sum.waited;
  status.memory = arena_->in_use();
  status.pid = getpid();
  status.world = static_cast<std::uint32_t>(status_->started);
  const OperationPtr& foremost = found.operation;
  if (!foremost) return status;
  const Request& request = foremost->request();
  status.kind = request.kind;
  status.number = request.numbered() ? static_cast<std::int64_t>(request.channel) : -1;
  status.age = std::max<std::int64_t>(now - foremost->submitted(), 0);
  const int blocker = foremost->other_blocker();
  status.blocker = blocker < 0 ? -1 : foremost->group().world_rank(blocker);
  status.waits = foremost->waits_since() != 0 ? 1 : 0;
  return status;
}

void Context::keep_remote_status(int peer, const std::byte* report, std::size_t bytes) {
  if (remote_ == nullptr || bytes != sizeof(RemoteStatus)) return;
  StatusRemote& entry = remote_[peer];
  std::atomic_ref sequence(entry.sequence);
  const std::uint32_t before = sequence.load(std::memory_order_relaxed);
  sequence.store(before + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(&entry.status, report, bytes);
  entry.received = now_ns();
  sequence.store(before + 2, std::memory_order_release);
}

// Requires groups_mutex_: the group's counters count for the rank from now on.
void Context::keep_counters(Group& group) { add_all(ended_, values_in_world(group)); }

// The groups of this context and of those whose world it is; sets the counters of groups that have ended.
// Together, because a group that ends meanwhile must not count twice.
std::vector<std::shared_ptr<Group>> Context::counted_groups(StatisticsValues& ended) {
  std::vector<std::shared_ptr<Context>> parts;  // outlives the locks
  std::lock_guard lock(groups_mutex_);
  ended = ended_;
  std::vector<std::shared_ptr<Group>> found = groups_;
  for (auto& each : parts_) {
    const std::shared_ptr<Context>& part = parts.emplace_back(each.lock());
    if (part == nullptr) continue;
    std::lock_guard part_lock(part->groups_mutex_);
    add_all(ended, part->ended_);
    found.insert(found.end(), part->groups_.begin(), part->groups_.end());
  }
  return found;
}

// A context whose world this is closes: its counters count here from now on.
void Context::end_part(Context& part) {
  std::scoped_lock lock(groups_mutex_, part.groups_mutex_);
  add_all(ended_, part.ended_);
  for (auto& group : part.groups_) add_all(ended_, values_in_world(*group));
  const std::weak_ptr<Context> ending = part.weak_from_this();
  std::erase_if(parts_,
                [&](const auto& each) { return !each.owner_before(ending) && !ending.owner_before(each); });
}

StatisticsValues Context::totals() {
  StatisticsValues sum;
  for (auto& group : counted_groups(sum)) add_all(sum, values_in_world(*group));
  sum.sort_late();
  return sum;
}

std::vector<StatusRemote> read_remote(int fd, const StatusPage& page) {
  if (page.remote == 0) return {};
  std::vector<StatusRemote> entries(page.size), again(entries.size());
  auto read = [&](std::vector<StatusRemote>& to) {
    return read_at(fd, to.data(), to.size() * sizeof(StatusRemote), page.remote);
  };
  auto same = [](const StatusRemote& a, const StatusRemote& b) {
    return a.sequence == b.sequence && a.sequence % 2 == 0;
  };
  if (!read(entries)) return {};
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (!read(again)) return {};
    if (std::ranges::equal(entries, again, same)) break;
    entries.swap(again);
  }
  for (StatusRemote& entry : entries) {
    RemoteStatus& status = entry.status;
    if (status.kind > Kind::kRecv) status.kind = {};
    if (status.blocker >= page.size) status.blocker = -1;
  }
  return entries;
}

bool read_status(int fd, StatusPage& page) {
  struct {
    std::uint64_t magic, status;
  } header{};
  static_assert(offsetof(ArenaHeader, status) == 8);
  if (!read_at(fd, &header, sizeof header, 0) || header.magic != kArenaMagic || header.status == 0)
    return false;
  auto bytes = reinterpret_cast<std::byte*>(&page);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (!read_at(fd, bytes, sizeof page, header.status)) return false;
    if (page.magic != kStatusMagic || page.version != kStatusVersion) return false;
    std::uint64_t after = 0;
    if (!read_at(fd, &after, sizeof after, header.status + offsetof(StatusPage, sequence))) return false;
    // A process that is stopped while it writes leaves an incomplete page, which is better than none.
    if (after == page.sequence.load() && after % 2 == 0) break;
  }
  page.job[kStatusText - 1] = 0;
  limit(page.ended, page.ended_latencies);
  page.count = std::min<std::uint32_t>(page.count, kStatusGroups);
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < page.count; ++i)
    if (is_plausible(page.groups[i], page.size)) page.groups[kept++] = page.groups[i];
  page.count = kept;
  return page.size >= 1 && page.size <= kMaxRanks && page.rank >= 0 && page.rank < page.size;
}

}  // namespace shoal
