// Division of work: threads in wait() run the operations that they wait for, the progress threads run the
// others, and the watch thread handles events of the peers.

#include <sched.h>

#include <algorithm>
#include <utility>

#include "common/clock.h"
#include "engine/context.h"

namespace shoal {
namespace {

// Time after a submission during which the progress threads check often.
constexpr std::int64_t kActive = 20 * kMillisecond;
// Time for which a thread in wait() polls without a pause: all members move data then.
constexpr std::int64_t kPolledYield = kSecond;
// In a large operation between hosts, a thread in wait() polls for this time without a pause and then between
// naps of increasing length: meanwhile the kernel keeps what arrives.
constexpr std::uint64_t kNapBytes = 1 << 20;  // of its input and output
constexpr std::int64_t kNapFrom = kMillisecond / 50, kPause = kMillisecond / 20, kLongestPause = 4 * kPause;
constexpr std::int64_t kLongNap = 50 * kMillisecond;
constexpr std::int64_t kStatusInterval = 50 * kMillisecond;
constexpr int kParked = 1;  // milliseconds until the watch thread takes back sockets that no thread polls

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// Reads the rings.  Threads that sleep look again: a message may be for one of them.
bool Context::poll_rings() {
  const bool moved = peers_.poll_rings();
  if (moved) bell().ring();
  return moved;
}

bool Context::progress(Remaining& remaining) {
  bool moved = poll_rings();
  for (auto& group : groups()) moved |= group->lanes().progress(remaining);
  return moved;
}

int Context::publish_core() {
  const int core = sched_getcpu();
  if (header_->core.load(std::memory_order_relaxed) != core)
    header_->core.store(core, std::memory_order_relaxed);
  return core;
}

void Context::check(std::int64_t now, std::int64_t& next) {
  for (auto& group : groups()) group->check(now, next);
}

void Context::submitted(bool large) {
  submissions_.fetch_add(1, std::memory_order_seq_cst);
  if (large || deep_.load(std::memory_order_seq_cst) > 0) bell().wake();
}

void Context::polled_by_caller() {
  if (inattentive_.load(std::memory_order_seq_cst) > 0) bell().wake();
}

bool Context::wait(Operation& op, std::int64_t until, Stage stage) {
  auto reached = [&op, stage] { return op.done() || (stage == Stage::kMet && op.met()); };
  if (reached()) return true;
  struct Attention {
    Operation& op;
    explicit Attention(Operation& o) : op(o) { op.group().lanes().add_waiter(op); }
    ~Attention() { op.group().lanes().remove_waiter(op); }
  } attention(op);
  SocketPolling driving(*this);
  publish_core();
  const bool naps = peers_.remote() && op.request().bytes() >= kNapBytes && !op.group().lanes().polled(op);
  const int spins = naps ? spins_ / 16 : spins_;
  int idle = 0;
  std::int64_t yield_until = 0, pause = kPause;
  while (true) {
    bool moved = op.group().lanes().drive(op);
    if (reached()) return true;
    if ((idle & 15) == 0) moved |= poll_rings();
    if ((idle & 15) == 0 || idle > spins) moved |= poll_sockets();
    if (moved) {
      idle = 0;
      pause = kPause;
      publish_core();
      continue;
    }
    if (idle < spins) {
      if ((++idle & 15) == 0 && peers_.any_on_core(publish_core()))
        sched_yield();
      else
        pause_cpu();
      continue;
    }
    std::int64_t now = now_ns();
    const bool polled = op.group().lanes().polled(op);
    if (idle++ == spins) yield_until = now + (polled ? kPolledYield : yield_time_);
    if (now < yield_until) {
      if (naps && now >= yield_until - yield_time_ + kNapFrom)
        nap(op, std::exchange(pause, std::min(2 * pause, kLongestPause)));
      else
        sched_yield();
      continue;
    }
    if (now >= until) return false;
    std::int64_t next = std::min(until, now + (polled ? kPollPause : 100 * kMillisecond));
    op.group().check(now, next);
    Doorbell::Sleeper sleeper(bell(), Wake::Any);
    driving.pause();
    moved = op.group().lanes().drive(op) || poll_rings();
    if (reached()) return true;
    wake_monitor();
    if (!moved) sleeper.sleep(next - now);
    driving.resume();
    idle = moved ? 0 : spins;  // woken: the event is there, or it is for another thread
  }
}

// Pauses for a moment, unless something can be done or a local peer wakes this thread.
void Context::nap(Operation& op, std::int64_t nanoseconds) {
  Doorbell::Sleeper sleeper(bell(), Wake::Any);
  if (!op.group().lanes().drive(op) && !poll_rings() && !op.done()) sleeper.sleep(nanoseconds);
}

// The first one also does what one thread is sufficient for.
void Context::progress_loop(bool first) {
  std::uint64_t seen = 0, sessions_seen = 0;
  std::int64_t active_until = 0, trim_at = 0, poll_pause = kPollPause;
  while (!stop_.load(std::memory_order_acquire)) {
    Remaining remaining = Remaining::kNone;
    if (progress(remaining)) {
      poll_pause = kPollPause;
      continue;
    }
    const bool waiting = remaining != Remaining::kNone, polled = remaining == Remaining::kPolled;
    const auto library = first ? moving_library() : nullptr;
    if (library && !polled) library->progress();
    std::int64_t now = now_ns();
    std::uint64_t submissions = submissions_.load(std::memory_order_acquire);
    if (submissions != seen) {
      seen = submissions;
      active_until = now + kActive;
    }
    std::int64_t next = kNever;
    if (first) {
      check(now, next);
      if (now >= buffers_->tidy_at()) buffers_->tidy(now);
      if (now >= trim_at && !arena_->trim(now - kIdleMemoryTime)) trim_at = now + kIdleMemoryTime / 4;
    }
    const bool active = now < active_until;
    // Threads that waited a moment ago read the rings, and will probably wait again: being woken for every
    // frame would only take their core.
    const std::uint64_t sessions = poll_sessions_.load(std::memory_order_relaxed);
    const bool left_to_waiters = !waiting && std::exchange(sessions_seen, sessions) != sessions;
    const int deep = !active && !waiting ? 1 : 0;
    const int inattentive = left_to_waiters ? 1 : 0;
    deep_.fetch_add(deep, std::memory_order_seq_cst);
    inattentive_.fetch_add(inattentive, std::memory_order_seq_cst);
    {
      Doorbell::Sleeper sleeper(bell(), waiting ? Wake::Any : left_to_waiters ? Wake::Call : Wake::Link);
      Remaining still = Remaining::kNone;
      bool moved = progress(still);
      if (!moved && still == remaining && submissions_.load(std::memory_order_seq_cst) == seen &&
          !stop_.load()) {
        if (waiting) wake_monitor();
        std::int64_t nap = waiting ? kLongNap : active ? progress_interval_ : library ? kLongNap : kSecond;
        if (left_to_waiters) nap = progress_interval_;
        if (polled) {
          nap = poll_pause;
          poll_pause = std::min(2 * poll_pause, kMillisecond);
        }
        sleeper.sleep(std::min(nap, next - now));
      }
    }
    deep_.fetch_sub(deep, std::memory_order_relaxed);
    inattentive_.fetch_sub(inattentive, std::memory_order_relaxed);
  }
}

// -- events of the peers --------------------------------------------------------------------------

void Context::watch_loop() {
  const LivenessHold holding(header_->life);
  std::uint64_t drives = 0;
  std::int64_t look_at = now_ns(), write_at = look_at;
  bool at_once = false, held = false;
  while (!stop_.load(std::memory_order_acquire)) {
    int patience = static_cast<int>(idle_peer_check_interval_ / kMillisecond);
    const std::int64_t now = now_ns();
    if (now >= write_at) {
      write_status(now);
      write_at = now + kStatusInterval;
    }
    if (peers_.local()) {
      if (now >= look_at || at_once) {
        look_at = now + check_local_peers(now, held, now - look_at);
        at_once = held = false;
      }
      patience = static_cast<int>((look_at - now) / kMillisecond) + 1;
    }
    if (peers_.remote()) {
      const int period =
          sockets_released_.load() ? kParked : static_cast<int>(peers_.period() / kMillisecond);
      patience = std::min(patience, period);
    }
    Peers::Events news = peers_.wait_for_events(patience);
    // If others evicted this rank, one of them has reported it, and all have cut their connections.
    if (!news.losses.empty()) peers_.read_rings();
    for (Loss& loss : news.losses) lost(std::move(loss));
    for (int peer : news.ended) quarantine_.ended(peer);
    held |= news.held;
    at_once |= news.woken || news.held;
    if (!peers_.remote()) continue;
    release_or_reclaim_sockets(news.readable, drives);
    for (Loss& loss : peers_.heartbeats(now_ns(), [this](std::int64_t at) { return remote_status(at); }))
      lost(std::move(loss));
  }
}

// Checks for local peers that died or were stopped by a signal; returns the time (ns) until the next check.
std::int64_t Context::check_local_peers(std::int64_t now, bool held, std::int64_t late) {
  header_->life.beat.store(now, std::memory_order_relaxed);
  for (Loss& loss : peers_.died()) lost(std::move(loss));
  for (Loss& loss : peers_.stopped(now, held, late)) {
    if (options_.patient) break;
    const int peer = loss.peer;
    peers_.mark_evicted(peer);  // before any process acts on it
    reached(Fault::kEvicted);
    lost(std::move(loss));
    peers_.disconnect(peer);  // notifies it when it continues, whichever groups exist
  }
  // Peers on other hosts need not wait for the heartbeat limit.
  if (evicted() && !std::exchange(retired_, true)) peers_.disconnect_remote();
  return busy() ? peer_check_interval_ : idle_peer_check_interval_;
}

// Whether operations or agreements are pending.  If not, a later waiter wakes the watch thread.
bool Context::busy() {
  monitor_idle_.store(true, std::memory_order_seq_cst);
  for (auto& group : groups()) {
    if (!group->lanes().pending() && !group->agreements().has_waiters()) continue;
    monitor_idle_.store(false, std::memory_order_relaxed);
    return true;
  }
  return false;
}

void Context::wake_monitor() {
  if (monitor_idle_.load(std::memory_order_seq_cst) && monitor_idle_.exchange(false)) peers_.wake();
}

// While a thread in wait() polls the sockets, the watch thread would only take its core at every segment.  So
// when the sockets become readable, it stops listening until the last polling waiter goes to sleep, or no
// thread has polled for a moment.  A waiter that leaves wait() does not rearm, because the next operation
// usually follows immediately.
void Context::release_or_reclaim_sockets(bool readable, std::uint64_t& seen) {
  if (!readable) {
    const std::uint64_t sessions = poll_sessions_.load(std::memory_order_relaxed);
    if (sockets_released_.load() && polling_waiters_.load() == 0 && sessions == seen) rearm();
    seen = sessions;
    return;
  }
  if (polling_waiters_.load() == 0) {
    poll_sockets();
    return;
  }
  peers_.listen(false);
  sockets_released_.store(true);
  if (polling_waiters_.load() == 0) rearm();  // the last waiter slept before it could see it
}

void Context::rearm() {
  if (sockets_released_.exchange(false)) peers_.listen(true);
}

// Reads the sockets, and runs operations that no thread waits for; waiting threads run the others.
bool Context::poll_sockets() {
  if (!peers_.remote() || !peers_.poll_sockets()) return false;
  Remaining remaining = Remaining::kNone;
  for (auto& group : groups()) group->lanes().progress(remaining);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_relaxed) > 0) bell().wake();
  return true;
}

void Context::SocketPolling::resume() {
  context.poll_sessions_.fetch_add(1, std::memory_order_relaxed);
  if (!context.peers_.remote()) return;
  context.asleep_.fetch_sub(static_cast<int>(paused));
  paused = false;
  context.polling_waiters_.fetch_add(1);
}

// Announces the sleep before checking whether this is the last waiter: so the last one rearms or wakes it.
void Context::SocketPolling::pause() {
  if (!context.peers_.remote()) return;
  paused = true;
  context.asleep_.fetch_add(1);
  if (context.polling_waiters_.fetch_sub(1) == 1) context.rearm();
}

Context::SocketPolling::~SocketPolling() {
  if (!context.peers_.remote()) return;
  if (paused)
    context.asleep_.fetch_sub(1);
  else if (context.polling_waiters_.fetch_sub(1) == 1 && context.asleep_.load() > 0)
    context.rearm();
}

}  // namespace shoal
