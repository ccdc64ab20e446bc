#include "engine/lanes.h"

#include <algorithm>

#include "engine/context.h"

namespace shoal {

Lanes::Lanes(Group& group, int count) : group_(group) {
  for (int i = 0; i < count; ++i) {
    lanes_.emplace_back().next = static_cast<std::uint64_t>(i);
    statistics_.emplace_back(group.size(), Counter::Writers::kOne);
  }
  statistics_.emplace_back(group.size(), Counter::Writers::kSeveral);
}

void Lanes::submit(const OperationPtr& op) {
  if (op->request().numbered()) {
    Lane& lane = lane_of(*op);
    {
      std::lock_guard lock(lane.mutex);
      lane.queue.push_back(op);
    }
    run(lane, RunMode::kBegin);
    return;
  }
  auto lane = std::make_shared<Lane>();
  lane->queue.push_back(op);
  run(*lane, RunMode::kBegin);
  if (op->done()) return;
  std::lock_guard lock(loose_mutex_);
  unordered_.push_back({op, lane});
  loose_count_.store(static_cast<int>(unordered_.size()), std::memory_order_relaxed);
}

// A thread that finds the token taken may go to sleep.  So the holder checks again before it leaves: the
// reason for which the other thread came may not have been there at the last check.
bool Lanes::run(Lane& lane, RunMode effort) {
  bool moved = false;
  do {
    if (lane.token.test_and_set(std::memory_order_seq_cst)) {
      lane.missed.store(true, std::memory_order_seq_cst);
      if (lane.token.test_and_set(std::memory_order_seq_cst)) return moved;
    }
    if (lane.missed.load(std::memory_order_relaxed)) lane.missed.exchange(false, std::memory_order_seq_cst);
    moved |= run_held(lane, effort);
    lane.token.clear(std::memory_order_seq_cst);
    if (effort == RunMode::kBegin && lane.missed.load(std::memory_order_seq_cst)) {
      group_.context().bell().wake();  // the other thread may have come for work that a submitter skips
      return moved;
    }
  } while (lane.missed.load(std::memory_order_seq_cst));
  return moved;
}

// Runs the lane's operations in order until one must wait.  Requires the token.
bool Lanes::run_held(Lane& lane, RunMode effort) {
  bool moved = false, polled = false;
  while (true) {
    OperationPtr op;
    {
      std::lock_guard lock(lane.mutex);
      if (!lane.queue.empty()) op = lane.queue.front();
    }
    if (!op) break;
    if (effort == RunMode::kBegin && op->large()) {
      moved |= op->begin();
    } else {
      moved |= op->step();
      if (!op->done()) group_.fail_if_unreachable(*op);
    }
    if (!op->done()) {
      polled = op->polled();
      break;
    }
    moved = true;
    std::lock_guard lock(lane.mutex);
    lane.queue.pop_front();
  }
  lane.polled.store(polled, std::memory_order_relaxed);
  return moved;
}

void Lanes::drop_done() {
  std::erase_if(unordered_, [](const UnorderedOperation& entry) { return entry.op->done(); });
  loose_count_.store(static_cast<int>(unordered_.size()), std::memory_order_relaxed);
}

bool Lanes::drive(Operation& op) {
  if (op.request().numbered()) return run(lane_of(op));
  std::shared_ptr<Lane> lane;
  {
    std::lock_guard lock(loose_mutex_);
    for (auto& entry : unordered_)
      if (entry.op.get() == &op) lane = entry.lane;
  }
  if (!lane) return false;
  bool moved = run(*lane);
  if (op.done()) {
    std::lock_guard lock(loose_mutex_);
    drop_done();
  }
  return moved;
}

void Lanes::add_waiter(Operation& op) {
  if (op.request().numbered())
    lane_of(op).waiters.fetch_add(1, std::memory_order_relaxed);
  else
    op.add_waiter(1);
}

// A progress thread takes over.  It may sleep after leaving an event to the waiter, which did not see it.
void Lanes::remove_waiter(Operation& op) {
  Context& context = group_.context();
  if (!op.request().numbered()) {
    op.add_waiter(-1);
    if (!op.done()) context.bell().wake();
    return;
  }
  Lane& lane = lane_of(op);
  lane.waiters.fetch_sub(1, std::memory_order_relaxed);
  if (!op.done()) return context.bell().wake();
  std::lock_guard lock(lane.mutex);
  if (lane.queue.empty()) return;
  context.submitted(false);
  context.bell().ring();
}

bool Lanes::polled(const Operation& op) {
  return op.request().numbered() && lane_of(op).polled.load(std::memory_order_relaxed);
}

bool Lanes::progress(Remaining& remaining) {
  bool moved = false;
  const bool all = group_.broken();
  for (Lane& lane : lanes_) {
    if (!all && lane.waiters.load(std::memory_order_relaxed) > 0) continue;
    {
      std::lock_guard lock(lane.mutex);
      if (lane.queue.empty()) continue;
    }
    moved |= run(lane);
    std::lock_guard lock(lane.mutex);
    if (!lane.queue.empty())
      remaining = std::max(
          remaining, lane.polled.load(std::memory_order_relaxed) ? Remaining::kPolled : Remaining::kSome);
  }
  if (loose_count_.load(std::memory_order_relaxed) == 0) return moved;
  std::vector<UnorderedOperation> loose;
  {
    std::lock_guard lock(loose_mutex_);
    loose = unordered_;
  }
  auto is_left = [all](const UnorderedOperation& entry) { return all || !entry.op->has_waiters(); };
  for (auto& entry : loose)
    if (is_left(entry)) moved |= run(*entry.lane);
  std::lock_guard lock(loose_mutex_);
  drop_done();
  if (std::ranges::any_of(unordered_, is_left)) remaining = std::max(remaining, Remaining::kSome);
  return moved;
}

bool Lanes::pending() {
  for (Lane& lane : lanes_) {
    std::lock_guard lock(lane.mutex);
    if (!lane.queue.empty()) return true;
  }
  std::lock_guard lock(loose_mutex_);
  return std::ranges::any_of(unordered_, [](const UnorderedOperation& entry) { return !entry.op->done(); });
}

template <class Look>
void Lanes::each_pending(Look look) {
  for (Lane& lane : lanes_) {
    std::lock_guard lock(lane.mutex);
    for (auto& op : lane.queue)
      if (!op->done()) look(op, op == lane.queue.front(), lane.waiters.load(std::memory_order_relaxed) > 0);
  }
  if (loose_count_.load(std::memory_order_relaxed) == 0) return;
  std::lock_guard lock(loose_mutex_);
  for (auto& entry : unordered_)
    if (!entry.op->done()) look(entry.op, true, entry.op->has_waiters());
}

Lanes::Late Lanes::late(std::int64_t now, std::int64_t& next) {
  Late late;
  each_pending([&](const OperationPtr& op, bool is_first, bool) {
    if (op->overdue(now, next)) late.overdue.push_back(op);
    if (is_first && op->is_stalled(now, next)) late.stalled.push_back(op);
  });
  return late;
}

void Lanes::completed(const Operation& op) {
  lane_of(op).next.store(op.request().channel + lanes_.size(), std::memory_order_seq_cst);
  if (group_.has_unanswered_closings())
    group_.context().bell().wake();  // the progress thread may now be able to answer
}

std::int64_t Lanes::last_completed() const {
  std::uint64_t next = ~0ULL;
  for (const Lane& lane : lanes_) next = std::min(next, lane.next.load(std::memory_order_seq_cst));
  return static_cast<std::int64_t>(next) - 1;
}

StatisticsValues Lanes::statistics() const {
  StatisticsValues sum;
  std::vector<LateMember> late(group_.size());
  for (const Statistics& each : statistics_) each.add_to(sum, late);
  for (int rank = 0; rank < group_.size(); ++rank) {
    LateMember& member = late[rank];
    member.rank = rank;
    if (member.times > 0 || member.waited > 0) sum.late.push_back(member);
  }
  sum.sort_late();
  return sum;
}

Lanes::Pending Lanes::pending_at(std::int64_t now) {
  Pending pending;
  each_pending([&](const OperationPtr& op, bool, bool has_waiters) {
    ++pending.count;
    if (const std::int64_t since = op->waits_since(); since != 0)
      pending.waits.push_back(
          {op->other_blocker(), 0, static_cast<std::uint64_t>(std::max(now - since, {}))});
    if (has_waiters || op->request().kind != Kind::kRecv) pending.foremost.consider(op, has_waiters);
  });
  return pending;
}

std::uint64_t Lanes::first_pending() {
  std::uint64_t first = ~0ULL;
  each_pending([&](const OperationPtr& op, bool, bool) {
    if (op->request().numbered()) first = std::min(first, op->request().channel);
  });
  return first;
}

}  // namespace shoal
