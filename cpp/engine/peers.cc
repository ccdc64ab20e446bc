#include "engine/peers.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <stdexcept>
#include <utility>

#include "common/clock.h"
#include "common/descriptors.h"
#include "common/process.h"

namespace shoal {
namespace {

constexpr std::size_t kRingCapacity = 128 * 1024;  // a constant, because both sides of a ring must know it

Loss process_ended(int rank) { return {rank, "its process has ended", ErrorCode::kPeerLost, true}; }

// After kSilentChecks checks without a beat, a local peer's process is examined.  It is lost when
// kStoppedChecks more checks have found it stopped: after 1.25 s in most jobs.
constexpr int kSilentChecks = 2, kStoppedChecks = 3;
// Maximum wait for a stopped peer if this process was stopped too: the whole job may have been suspended, and
// its processes may be resumed one after another.
constexpr std::int64_t kMaxSuspendGrace = 60 * kSecond;

// The same for a thread that may have been stopped, or had no CPU.
std::int64_t excused(std::int64_t late) {
  return late < kSecond / 10 ? 0 : std::clamp(10 * late, 5 * kSecond, kMaxSuspendGrace);
}

// The subject of an epoll event, besides the rank of a local peer.
constexpr std::uint64_t kWakeup = 1ULL << 32, kPidfd = 1ULL << 33, kSockets = 1ULL << 34;

}  // namespace

Peers::Peers(FrameSink& sink, int rank, int size, std::int64_t heartbeat, std::int64_t look)
    : sink_(sink),
      rank_(rank),
      look_(look),
      heartbeat_(heartbeat),
      beats_((kSilentChecks + kStoppedChecks) * look),
      peers_(size) {
  try {
    epoll_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
    wakeup_ = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
    sockets_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
    watch_fd(epoll_, wakeup_, kWakeup);
    watch_fd(epoll_, sockets_, kSockets);
  } catch (...) {
    close_all({&wakeup_, &epoll_, &sockets_});
    throw;
  }
}

Peers::~Peers() {
  for (Peer& peer : peers_) peer.link.reset();
  close_descriptors();
  close_all({&epoll_, &sockets_});
}

std::uint64_t Peers::make_ring(Arena& arena) {
  std::uint64_t offset = arena.allocate(Ring::footprint(kRingCapacity), false);
  new (arena.mapping().base() + offset) Ring;
  return offset;
}

Peers::Peer& Peers::new_peer(int rank) {
  if (rank < 0 || rank >= size() || rank == rank_)
    throw std::invalid_argument("rank " + std::to_string(rank) + " cannot be a peer of rank " +
                                std::to_string(rank_) + " of " + std::to_string(size()));
  if (at(rank).link) throw std::invalid_argument("rank " + std::to_string(rank) + " is connected already");
  return at(rank);
}

// Takes the socket, unless it throws.
void Peers::add_local(Arena& arena, int rank, int socket, int memory_fd, std::size_t capacity,
                      std::uint64_t out, std::uint64_t in, int pid) {
  Peer& peer = new_peer(rank);
  auto memory = std::make_unique<Mapping>(memory_fd, capacity);
  auto fits = [](const Mapping& mapping, std::uint64_t ring) {
    return ring >= sizeof(ArenaHeader) && ring % alignof(Ring) == 0 &&
           mapping.holds(ring, Ring::footprint(kRingCapacity));
  };
  if (capacity < sizeof(ArenaHeader) || memory->at<ArenaHeader>(0)->magic != kArenaMagic)
    throw BadMemory("the shared memory of rank " + std::to_string(rank) + " is not an arena");
  if (!fits(arena.mapping(), out) || !fits(*memory, in))
    throw BadMemory("the ring of rank " + std::to_string(rank) + " lies outside its shared memory");
  auto link = std::make_unique<RingLink>(rank, sink_, arena.mapping().at<Ring>(out), memory->at<Ring>(in),
                                         kRingCapacity, &memory->at<ArenaHeader>(0)->doorbell);
  // A forked child of the peer may keep the socket open, so the process itself is watched.
  int pidfd = pid > 0 && pid != getpid() ? open_pidfd(pid) : -1;
  const bool ended = pidfd < 0 && pid > 0 && pid != getpid() && errno == ESRCH;
  try {
    watch_fd(epoll_, socket, static_cast<std::uint64_t>(rank));
    if (pidfd >= 0) watch_fd(epoll_, pidfd, kPidfd | static_cast<std::uint64_t>(rank));
    ring_peers_.push_back(rank);
  } catch (...) {
    close_all({&pidfd});
    throw;
  }
  peer.memory = std::move(memory);
  peer.socket = socket;
  peer.pidfd = pidfd;
  peer.dead = ended;
  peer.ring = link.get();
  peer.link = std::move(link);
}

void Peers::add_remote(int rank, int socket) {
  Peer& peer = new_peer(rank);
  auto link = std::make_unique<SocketLink>(rank, sink_, socket, sockets_);
  peer.tcp = link.get();
  peer.link = std::move(link);
  remote_ = true;
}

// It is not known whether this process was stopped before.
void Peers::start(std::int64_t now) {
  heartbeat_.start(now);
  beats_.start(now);
  for (int rank : ring_peers_) at(rank).grace_until = now + kMaxSuspendGrace;
}

// -- reading and writing ----------------------------------------------------------------------------------

bool Peers::poll_rings() {
  bool any = false;
  for (int rank : ring_peers_) {
    RingLink& ring = *at(rank).ring;
    if (ring.readable()) any |= ring.receive();
    if (ring.backlog()) any |= ring.flush();
  }
  return any;
}

bool Peers::any_on_core(int core) const {
  return std::ranges::any_of(ring_peers_, [this, core](int rank) {
    return at(rank).memory->at<ArenaHeader>(0)->core.load(std::memory_order_relaxed) == core;
  });
}

void Peers::read_rings() {
  for (int rank : ring_peers_)
    if (RingLink& ring = *at(rank).ring; !ring.broken()) ring.receive_all();
}

bool Peers::poll_sockets() {
  epoll_event events[16];
  int count = epoll_wait(sockets_, events, 16, 0);
  bool moved = false;
  for (int i = 0; i < count; ++i) {
    SocketLink& link = *at(static_cast<int>(events[i].data.u64)).tcp;
    if (events[i].events & EPOLLOUT) {
      link.flush();
      moved = true;
    }
    if (events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) moved |= link.receive();
  }
  return moved;
}

// -- watching ---------------------------------------------------------------------------------------------

Peers::Events Peers::wait_for_events(int milliseconds) {
  epoll_event events[64];
  int count = epoll_wait(epoll_, events, 64, milliseconds);
  Events news;
  news.held = count < 0 && errno == EINTR;  // this thread handles no signals
  for (int i = 0; i < count; ++i) {
    const std::uint64_t what = events[i].data.u64;
    news.readable |= what == kSockets;
    if (what == kSockets) continue;
    if (what == kWakeup) {
      std::uint64_t times;
      (void)!read(wakeup_, &times, sizeof times);
      news.woken = true;
      continue;
    }
    const int rank = static_cast<int>(what & 0xffffffffULL);
    const bool process = (what & kPidfd) != 0;
    const int fd = process ? at(rank).pidfd : at(rank).socket;
    char byte;
    if (!process && read(fd, &byte, 1) == 1) continue;
    epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
    if (process) news.ended.push_back(rank);
    news.losses.push_back(process ? process_ended(rank) : Loss{rank, "its connection closed"});
  }
  return news;
}

void Peers::wake() {
  std::uint64_t one = 1;
  std::lock_guard lock(descriptors_mutex_);
  (void)!write(wakeup_, &one, sizeof one);
}

void Peers::listen(bool sockets) {
  epoll_event event{};
  if (sockets) event.events = EPOLLIN;
  event.data.u64 = kSockets;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, sockets_, &event);
}

std::vector<Loss> Peers::heartbeats(std::int64_t now,
                                    const std::function<RemoteStatus(std::int64_t)>& report) {
  std::vector<Loss> losses;
  if (!heartbeat_.due(now)) return losses;
  FrameHeader beat;
  beat.type = FrameType::kHeartbeat;
  const RemoteStatus status = report(now);
  for (int rank = 0; rank < size(); ++rank) {
    SocketLink* tcp = at(rank).tcp;
    if (tcp == nullptr || tcp->broken() || state(rank) != kAlive) continue;
    if (!silent_.load() && !tcp->backlog()) tcp->send_control(beat, &status, sizeof status);
    if (std::string silence = heartbeat_.silence(tcp->last_heard(), now); !silence.empty())
      losses.push_back({rank, std::move(silence)});
  }
  return losses;
}

std::vector<Loss> Peers::stopped(std::int64_t now, bool held, std::int64_t late) {
  std::vector<Loss> losses;
  beats_.due(now);  // no beats are sent, but this records when the thread did not run
  const std::int64_t excuse = held ? kMaxSuspendGrace : excused(late);
  for (int rank : ring_peers_) {
    Peer& peer = at(rank);
    if (state(rank) != kAlive) continue;
    if (is_evicted(rank)) {  // by a process that has watched it continuously
      losses.push_back({rank, kStoppedText});
      continue;
    }
    if (peer.pidfd < 0) continue;
    if (const std::int64_t beat = life(peer).beat.load(std::memory_order_relaxed); beat != peer.beat) {
      peer.beat = beat;
      peer.beat_at = now;
      peer.grace_until = 0;
    }
    if (excuse > 0) peer.grace_until = std::max(peer.grace_until, now + excuse);
    if (now < peer.grace_until || now - peer.beat_at < kSilentChecks * look_ ||
        !stopped_by_signal(peer.pidfd))
      peer.stopped_since = 0;
    else if (peer.stopped_since == 0)
      peer.stopped_since = now;
    else if (now - peer.stopped_since >= kStoppedChecks * look_)
      losses.push_back({rank, kStoppedText});
  }
  return losses;
}

std::string Peers::absence() const {
  const std::int64_t now = now_ns();
  const std::int64_t gap = std::max(remote_ ? heartbeat_.absence(now) : 0, local() ? beats_.absence(now) : 0);
  return gap == 0 ? ""
                  : "this rank did not run for " + seconds(gap) + " (it was stopped, or got no processor)";
}

// -- deaths -----------------------------------------------------------------------------------------------

bool Peers::mark_lost(Loss& loss) {
  Peer& peer = at(loss.peer);
  if (loss.dead) peer.dead.store(true);  // before any thread selects the peers to notify
  loss.dead = peer.dead.load();
  // Frames that it sent before still count, including its goodbye.
  if (peer.ring != nullptr && !peer.ring->broken()) peer.ring->receive_all();
  int alive = kAlive;
  if (!peer.state.compare_exchange_strong(alive, kLost)) return false;
  if (peer.link) peer.link->give_up();
  if (loss.dead) return true;
  if (const std::string gap = absence(); !gap.empty())
    loss.why += "; " + gap + ", so the others may have evicted it";
  return true;
}

bool Peers::mark_left(int rank, Departure why) {
  int alive = kAlive;
  return at(rank).state.compare_exchange_strong(alive, why == kProgramEnded ? kEnded : kDeparted);
}

bool Peers::breaking() {
  bool any = false;
  for (int rank = 0; rank < size(); ++rank) {
    SocketLink* tcp = at(rank).tcp;
    if (tcp == nullptr || state(rank) != kAlive) continue;
    if (!tcp->broken()) tcp->await_reader();
    any |= tcp->broken() && state(rank) == kAlive;
  }
  return any;
}

std::vector<Loss> Peers::died() const {
  std::vector<Loss> losses;
  for (int rank : ring_peers_)
    if (life(at(rank)).marked() && !dead(rank)) losses.push_back(process_ended(rank));
  return losses;
}

std::vector<Loss> Peers::ended() {
  std::vector<Loss> dead, losses;
  {
    std::lock_guard lock(descriptors_mutex_);
    for (int rank = 0; rank < size(); ++rank) {
      const Peer& peer = at(rank);
      if (state(rank) == kAlive && peer.memory && (life(peer).marked() || has_ended(peer.pidfd)))
        dead.push_back(process_ended(rank));
    }
  }
  for (Loss& loss : dead)
    if (mark_lost(loss)) losses.push_back(std::move(loss));
  return losses;
}

std::vector<int> Peers::fence(const std::vector<int>& ranks, std::int64_t until) {
  std::vector<std::pair<int, int>> living;  // rank and pidfd
  {
    std::lock_guard lock(descriptors_mutex_);
    for (int rank : ranks) {
      const Peer& peer = at(rank);
      if (!peer.memory || peer.pidfd < 0 || dead(rank)) continue;
      if (state(rank) != kLost && !stopped_by_signal(peer.pidfd)) continue;
      living.emplace_back(rank, checked(fcntl(peer.pidfd, F_DUPFD_CLOEXEC, 0), "fcntl"));
      send_signal(living.back().second, SIGKILL);
    }
  }
  // When the kernel has marked its life, none of its threads runs; freeing its memory may take a second.
  auto ended = [&](const std::pair<int, int>& it) {
    return life(at(it.first)).marked() || has_ended(it.second);
  };
  while (!std::ranges::all_of(living, ended) && now_ns() < until) usleep(500);
  std::vector<int> left;
  for (auto& it : living) {
    if (ended(it))
      at(it.first).dead.store(true);
    else
      left.push_back(it.first);
    close_all({&it.second});
  }
  return left;
}

std::vector<int> Peers::all_lost() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size(); ++rank)
    if (state(rank) == kLost || at(rank).lost_to_others.load()) ranks.push_back(rank);
  return ranks;
}

void Peers::disconnect(int rank) {
  Peer& peer = at(rank);
  if (peer.tcp != nullptr)
    peer.tcp->disconnect();
  else if (peer.socket >= 0)
    shutdown(peer.socket, SHUT_RDWR);
}

void Peers::disconnect_remote() {
  for (int rank = 0; rank < size(); ++rank)
    if (remote(rank)) disconnect(rank);
}

std::uint64_t Peers::lent() const {
  std::uint64_t bytes = 0;
  for (const Peer& peer : peers_)
    if (peer.link) bytes += peer.link->lent();
  return bytes;
}

// -- the end ----------------------------------------------------------------------------------------------

void Peers::say_goodbye(Departure why, std::int64_t deadline) {
  FrameHeader bye;
  bye.type = FrameType::kBye;
  bye.code = why;
  for (Peer& peer : peers_)
    if (peer.link && !peer.link->broken()) peer.link->send_control(bye);
  auto flushed = [&] {
    return std::ranges::all_of(
        peers_, [](Peer& p) { return !p.link || p.state.load() != kAlive || !p.link->backlog(); });
  };
  while (!flushed() && now_ns() < deadline) {
    for (Peer& peer : peers_)
      if (peer.link) peer.link->flush();
    if (!flushed()) usleep(500);
  }
  for (Peer& peer : peers_)  // a lost peer may never accept the bytes
    if (peer.tcp != nullptr && peer.state.load() != kLost) peer.tcp->drain(deadline, heartbeat_.limit());
}

void Peers::close_descriptors() {
  std::lock_guard lock(descriptors_mutex_);
  for (Peer& peer : peers_) close_all({&peer.socket, &peer.pidfd});
  close_all({&wakeup_});
}

void Peers::close() {
  for (Peer& peer : peers_)
    if (peer.link) peer.link->close();
  close_descriptors();
  close_all({&epoll_});
}

// Takes no locks: they may be held by threads that exist only in the parent.
void Peers::disown() {
  for (Peer& peer : peers_) {
    if (peer.tcp != nullptr) peer.tcp->disown();
    if (peer.memory) peer.memory->disown();
    close_all({&peer.socket, &peer.pidfd});
  }
  close_all({&epoll_, &sockets_, &wakeup_});
}

}  // namespace shoal
