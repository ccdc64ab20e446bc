// The watch thread: sockets, deaths and heartbeats.  Also how a context ends.

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "base/clock.h"
#include "engine/context.h"
#include "engine/describe.h"

namespace shoal {
namespace {

constexpr const char* kEnded = "its process has ended";
constexpr int kParked = 1;  // milliseconds after which the watch thread takes back sockets that nobody polls

}  // namespace

void Context::watch_loop() {
  epoll_event events[64];
  std::int64_t period = std::clamp<std::int64_t>(options_.heartbeat / 4, 10'000'000, 1'000'000'000);
  std::uint64_t drives = 0;
  while (!stop_.load(std::memory_order_acquire)) {
    int patience = !remote_ ? -1 : parked_.load() ? kParked : static_cast<int>(period / 1'000'000);
    int count = epoll_wait(epoll_, events, 64, patience);
    bool readable = false;
    for (int i = 0; i < count; ++i) {
      std::uint64_t what = events[i].data.u64;
      if (what == kWakeup) continue;
      if (what == kSockets) {
        readable = true;
        continue;
      }
      int rank = static_cast<int>(what & 0xffffffffULL);
      Peer& peer = peers_[static_cast<std::size_t>(rank)];
      if (what & kPidfd) {
        epoll_ctl(epoll_, EPOLL_CTL_DEL, peer.pidfd, nullptr);
        lost(rank, kEnded);
      } else {
        char byte;
        if (read(peer.socket, &byte, 1) != 1) {
          epoll_ctl(epoll_, EPOLL_CTL_DEL, peer.socket, nullptr);
          lost(rank, "its connection closed");
        }
      }
    }
    if (remote_) {
      park_or_rearm(readable, drives);
      heartbeats(now_ns());
    }
  }
}

// While a thread in wait() polls the sockets, the watch thread would only take its core away at every
// segment: told that there is something to read, it stops listening ("parks") until the last driver goes to
// sleep, or nobody has driven for a moment.  A driver that only leaves wait() does not rearm: most often the
// next operation follows at once.
void Context::park_or_rearm(bool readable, std::uint64_t& seen) {
  if (!readable) {
    const std::uint64_t drives = drives_.load(std::memory_order_relaxed);
    if (parked_.load() && drivers_.load() == 0 && drives == seen) rearm();
    seen = drives;
    return;
  }
  if (drivers_.load() == 0) {
    poll_sockets();
    return;
  }
  epoll_event none{};
  none.data.u64 = kSockets;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, sockets_, &none);
  parked_.store(true);
  if (drivers_.load() == 0) rearm();  // it went to sleep before it could see that we are parked
}

void Context::rearm() {
  if (!parked_.exchange(false)) return;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kSockets;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, sockets_, &event);
}

// Reads and writes what the sockets are ready for, and runs what came of it: the operations that nobody
// attends here, the others in the threads that wait for them.
bool Context::poll_sockets() {
  if (!remote_) return false;
  epoll_event events[16];
  int count = epoll_wait(sockets_, events, 16, 0);
  bool moved = false;
  for (int i = 0; i < count; ++i) {
    TcpLink& link = *peers_[static_cast<std::size_t>(events[i].data.u64)].tcp;
    if (events[i].events & EPOLLOUT) {
      link.flush();
      moved = true;
    }
    if (events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) moved |= link.receive();
  }
  if (!moved) return false;
  bool waiting = false;
  for (auto& group : groups()) group->lanes().progress(waiting);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_relaxed) > 0) bell().wake();
  return true;
}

void Context::Driving::resume() {
  if (!context.remote_) return;
  context.asleep_.fetch_sub(static_cast<int>(paused));
  paused = false;
  context.drivers_.fetch_add(1);
  context.drives_.fetch_add(1, std::memory_order_relaxed);
}

// Announces the sleep before it looks whether it is the last to drive: so the last one rearms, or wakes us.
void Context::Driving::pause() {
  if (!context.remote_) return;
  paused = true;
  context.asleep_.fetch_add(1);
  if (context.drivers_.fetch_sub(1) == 1) context.rearm();
}

Context::Driving::~Driving() {
  if (!context.remote_) return;
  if (paused)
    context.asleep_.fetch_sub(1);
  else if (context.drivers_.fetch_sub(1) == 1 && context.asleep_.load() > 0)
    context.rearm();
}

// A watcher that did not run itself cannot tell how long the others were silent: what they sent meanwhile may
// lie unread, and they may have been stopped together with it.  They get the whole time to speak anew.
void Context::mind_the_gap(std::int64_t now) {
  const std::int64_t gap = now - last_round_.exchange(now);
  if (gap < options_.heartbeat / 2) return;
  gap_.store(gap);
  watching_since_.store(now);
}

std::string Context::absence() const {
  if (!remote_) return {};
  const std::int64_t now = now_ns();
  std::int64_t gap = now - last_round_.load();  // the watch thread may not have run again yet
  if (gap < options_.heartbeat / 2) gap = now - watching_since_.load() < options_.heartbeat ? gap_.load() : 0;
  return gap == 0 ? ""
                  : "this rank did not run for " + seconds(gap) + " (it was stopped, or got no processor)";
}

void Context::heartbeats(std::int64_t now) {
  mind_the_gap(now);
  std::int64_t period = std::clamp<std::int64_t>(options_.heartbeat / 4, 10'000'000, 1'000'000'000);
  if (now - last_beat_ < period) return;
  last_beat_ = now;
  FrameHeader beat;
  beat.type = FrameType::kHeartbeat;
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = peers_[rank];
    if (peer.tcp == nullptr || peer.tcp->broken() || peer.state.load() != Peer::kAlive) continue;
    if (!silent_.load() && !peer.tcp->backlog()) peer.tcp->send_control(beat);
    std::int64_t quiet = now - std::max(peer.tcp->last_heard(), watching_since_.load());
    if (quiet > options_.heartbeat)
      lost(static_cast<int>(rank), "nothing was heard from its host for " + seconds(quiet) +
                                       "; it is stopped or starved, or the network is cut");
  }
}

void Context::lost(int rank, std::string why, ErrorCode code) {
  if (bury(rank, why)) {
    std::vector<Loss> losses{{rank, why, code}};
    for (Loss& other : ended()) losses.push_back(std::move(other));  // several often die together
    tell_groups(losses);
  }
  bell().wake();
}

void Context::tell_groups(const std::vector<Loss>& losses) {
  bool silent = false;  // a group does not tell those that are lost, in case they live
  for (auto& group : groups()) silent |= group->on_peers_lost(losses);
  for (const Loss& loss : losses) {
    messenger_.gone(loss.peer);
    TcpLink* tcp = peers_[static_cast<std::size_t>(loss.peer)].tcp;
    if (silent && tcp != nullptr) tcp->sever();
  }
  bell().wake();  // receives may have been posted again
  drop_groups();
}

// Marks a peer as lost; false if it had left before.
bool Context::bury(int rank, std::string& why) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  // What it had sent before still counts, its farewell too.
  if (peer.ring != nullptr && !peer.ring->broken()) peer.ring->receive_all();
  int alive = Peer::kAlive;
  if (!peer.state.compare_exchange_strong(alive, Peer::kLost)) return false;
  if (peer.tcp == nullptr) return true;
  if (const std::string gap = absence(); !gap.empty()) why += "; " + gap + ", so it may have been given up";
  return true;
}

// The local peers whose processes have ended and of whom nobody knows it yet.
std::vector<Loss> Context::ended() {
  std::vector<int> dead;
  {
    std::lock_guard lock(descriptors_mutex_);
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
      const Peer& peer = peers_[rank];
      pollfd look{peer.pidfd, POLLIN, 0};
      if (peer.pidfd >= 0 && peer.state.load() == Peer::kAlive && ::poll(&look, 1, 0) == 1)
        dead.push_back(static_cast<int>(rank));
    }
  }
  std::vector<Loss> losses;
  for (int rank : dead)
    if (std::string why = kEnded; bury(rank, why)) losses.push_back({rank, why, ErrorCode::kPeerLost});
  return losses;
}

void Context::look_for_deaths() {
  if (forked_ || closed()) return;
  poll_sockets();
  const std::vector<Loss> losses = ended();
  if (!losses.empty()) tell_groups(losses);
}

std::vector<int> Context::all_lost() {
  look_for_deaths();
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < peers_.size(); ++rank)
    if (peers_[rank].state.load() == Peer::kLost || peers_[rank].lost_to_others.load())
      ranks.push_back(static_cast<int>(rank));
  return ranks;
}

void Context::on_link_lost(Link& link, LinkEnd end, const char* why) {
  if (end == LinkEnd::kGone) return lost(link.peer(), why);
  lost(link.peer(), std::string("it sent ") + why + "; the connection to it was cut", ErrorCode::kWire);
  sever(link.peer());  // it hears at once, though nobody reads what it goes on sending
}

void Context::departed(int rank, Departure why) {
  int alive = Peer::kAlive;
  const int state = why == kProgramEnded ? Peer::kEnded : Peer::kDeparted;
  if (!peers_[static_cast<std::size_t>(rank)].state.compare_exchange_strong(alive, state)) return;
  for (auto& group : groups())
    if (int member = group->rank_of(rank); member >= 0) group->on_peer_closed(member, 0, why);
  messenger_.gone(rank);
  drop_groups();
}

void Context::close(std::int64_t deadline) {
  if (!started_ || closed_ || forked_) return;
  closed_ = true;
  FrameHeader bye;
  bye.type = FrameType::kBye;
  bye.code = departure();
  for (Peer& peer : peers_)
    if (peer.link && !peer.link->broken()) peer.link->send_control(bye);
  auto flushed = [&] {
    return std::all_of(peers_.begin(), peers_.end(), [](Peer& p) {
      return !p.link || p.state.load() != Peer::kAlive || !p.link->backlog();
    });
  };
  while (!flushed() && now_ns() < deadline) {
    for (Peer& peer : peers_)
      if (peer.link) peer.link->flush();
    if (!flushed()) usleep(500);
  }
  for (Peer& peer : peers_)
    if (peer.tcp != nullptr) peer.tcp->drain(deadline);
  stop_.store(true, std::memory_order_release);
  bell().wake();
  std::uint64_t one = 1;
  (void)!write(wakeup_, &one, sizeof one);
  {
    std::lock_guard lock(completions_mutex_);
    completions_ready_.notify_all();
  }
  if (progress_thread_.joinable()) progress_thread_.join();
  if (watch_thread_.joinable()) watch_thread_.join();
  for (Peer& peer : peers_)
    if (peer.link) peer.link->close();
  {
    std::lock_guard lock(descriptors_mutex_);
    for (Peer& peer : peers_) {
      if (peer.socket >= 0) ::close(peer.socket);
      if (peer.pidfd >= 0) ::close(peer.pidfd);
      peer.socket = peer.pidfd = -1;
    }
  }
  ::close(epoll_);
  ::close(wakeup_);
  epoll_ = wakeup_ = -1;
  std::lock_guard lock(groups_mutex_);
  groups_.clear();
}

void Context::disown() {
  forked_ = true;
  arena_->disown();
  for (Peer& peer : peers_) {
    if (peer.tcp != nullptr) peer.tcp->disown();
    if (peer.memory) peer.memory->disown();
    if (peer.socket >= 0) ::close(peer.socket);
    if (peer.pidfd >= 0) ::close(peer.pidfd);
    peer.socket = peer.pidfd = -1;
  }
  if (epoll_ >= 0) ::close(epoll_);
  if (sockets_ >= 0) ::close(sockets_);
  if (wakeup_ >= 0) ::close(wakeup_);
  epoll_ = wakeup_ = sockets_ = -1;
  // The threads exist only in the parent.
  if (progress_thread_.joinable()) progress_thread_.detach();
  if (watch_thread_.joinable()) watch_thread_.detach();
}

std::tuple<std::size_t, std::size_t, std::size_t, std::uint64_t> Context::held() {
  auto [groups, messages] = messenger_.held();
  std::uint64_t lent = 0;
  for (Peer& peer : peers_)
    if (peer.link) lent += peer.link->lent();
  std::lock_guard lock(groups_mutex_);
  return {groups, messages, early_.size(), lent};
}

void Context::sever(int peer) {
  Peer& other = peers_[static_cast<std::size_t>(peer)];
  if (other.tcp != nullptr)
    other.tcp->sever();
  else if (other.socket >= 0)
    shutdown(other.socket, SHUT_RDWR);
}

}  // namespace shoal
