#include "engine/context.h"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <new>
#include <stdexcept>
#include <system_error>

#include "base/clock.h"
#include "transport/check.h"

namespace shoal {
namespace {

constexpr std::int64_t kMillisecond = 1'000'000;
constexpr std::size_t kRingCapacity = 128 * 1024;  // the same for all: both sides of a ring must know it
// Bytes kept of one peer's frames that end groups which do not exist here yet.
constexpr std::size_t kMostEarly = 1 << 20;
constexpr std::int64_t kActive =
    20 * kMillisecond;  // how long after a submission the progress thread looks in
// How long released memory keeps its pages: a training loop takes the same sizes again in its next step.
constexpr std::int64_t kWarm = 2000 * kMillisecond;

// The result of a system call that fails only where the system has no more to give.
int checked(int result, const char* call) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), call);
  return result;
}

// Tells when a process has ended; -1 where the kernel has nothing that does, or it has ended already.
int handle_of(int pid) {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM)) checked(fd, "pidfd_open");
  return fd;
}

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Context::Context(Options options) : options_(options), peers_(static_cast<std::size_t>(options.size)) {
  arena_ = std::make_shared<Arena>(options.capacity, options.limit);
  std::uint64_t offset = arena_->allocate(sizeof(ArenaHeader));  // the first allocation: offset 0
  header_ = new (arena_->mapping().base() + offset) ArenaHeader;
  // Spin only where every rank of the host has a core; else give the core away a few times, then sleep.
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  bool roomy = options_.local_size <= cores;
  // Giving up too early costs a wake-up each way, and once both sides sleep they never catch each other awake
  // again.
  spins_ = roomy ? 1000 : 0;
  patience_ = roomy ? kMillisecond : kMillisecond / 5;
  // Progress threads look in once a millisecond a core, not a rank: 64 ranks on 2 cores would do little else.
  look_in_ = kMillisecond * std::max(1, options_.local_size / cores);
  try {
    epoll_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
    wakeup_ = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
    sockets_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
    watch(wakeup_, kWakeup);
    watch(sockets_, kSockets);
  } catch (...) {
    release_descriptors();
    throw;
  }
}

Context::~Context() {
  if (!forked_ && started_ && !closed_) close(now_ns());
  messenger_.clear();
  for (Peer& peer : peers_) {
    peer.link.reset();
    if (peer.socket >= 0) ::close(peer.socket);
    if (peer.pidfd >= 0) ::close(peer.pidfd);
  }
  release_descriptors();
}

void Context::release_descriptors() {
  for (int* fd : {&wakeup_, &epoll_, &sockets_}) {
    if (*fd >= 0) ::close(*fd);
    *fd = -1;
  }
}

void Context::watch(int fd, std::uint64_t what) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = what;
  checked(epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
}

std::uint64_t Context::make_ring() {
  std::uint64_t offset = arena_->allocate(Ring::footprint(kRingCapacity), false);
  new (arena_->mapping().base() + offset) Ring;
  return offset;
}

Context::Peer& Context::new_peer(int rank) {
  if (rank < 0 || rank >= options_.size || rank == options_.rank)
    throw std::invalid_argument("rank " + std::to_string(rank) + " cannot be a peer of rank " +
                                std::to_string(options_.rank) + " of " + std::to_string(options_.size));
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.link) throw std::invalid_argument("rank " + std::to_string(rank) + " is connected already");
  return peer;
}

// The socket belongs to the context from the moment that this returns, and not if it throws.
void Context::add_local(int rank, int socket, int memory_fd, std::size_t capacity, std::uint64_t out,
                        std::uint64_t in, int pid) {
  Peer& peer = new_peer(rank);
  auto memory = std::make_unique<Mapping>(memory_fd, capacity);
  auto fits = [](const Mapping& mapping, std::uint64_t ring) {
    return ring >= sizeof(ArenaHeader) && ring % alignof(Ring) == 0 &&
           mapping.holds(ring, Ring::footprint(kRingCapacity));
  };
  if (capacity < sizeof(ArenaHeader) || memory->at<ArenaHeader>(0)->magic != kArenaMagic)
    throw BadMemory("the shared memory of rank " + std::to_string(rank) + " is not an arena");
  if (!fits(arena_->mapping(), out) || !fits(*memory, in))
    throw BadMemory("the ring of rank " + std::to_string(rank) + " lies outside its shared memory");
  auto& header = *memory->at<ArenaHeader>(0);
  auto link = std::make_unique<RingLink>(rank, *this, arena_->mapping().at<Ring>(out), memory->at<Ring>(in),
                                         kRingCapacity, &header.doorbell);
  // A forked child of the peer may hold its socket open; the process itself is what counts.
  const int pidfd = pid > 0 && pid != getpid() ? handle_of(pid) : -1;
  try {
    watch(socket, static_cast<std::uint64_t>(rank));
    if (pidfd >= 0) watch(pidfd, kPidfd | static_cast<std::uint64_t>(rank));
    ring_peers_.push_back(rank);
  } catch (...) {
    if (pidfd >= 0) ::close(pidfd);
    throw;
  }
  peer.memory = std::move(memory);
  peer.socket = socket;
  peer.pidfd = pidfd;
  peer.ring = link.get();
  peer.link = std::move(link);
}

void Context::add_remote(int rank, int socket) {
  Peer& peer = new_peer(rank);
  auto link = std::make_unique<TcpLink>(rank, *this, socket, sockets_);
  peer.tcp = link.get();
  peer.link = std::move(link);
  remote_ = true;
}

void Context::start() {
  started_ = true;
  last_round_ = watching_since_ = now_ns();
  // Signals are for the threads of the program: they interrupt its system calls and run its handlers.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    progress_thread_ = std::thread([this] { progress_loop(); });
    watch_thread_ = std::thread([this] { watch_loop(); });
  } catch (...) {  // the system has no more threads; the one that runs ends when the context is closed
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(progress_thread_.native_handle(), "shoal-progress");
  pthread_setname_np(watch_thread_.native_handle(), "shoal-watch");
}

Link* Context::link(int peer) const { return peers_[static_cast<std::size_t>(peer)].link.get(); }

const Mapping& Context::peer_memory(int peer) const {
  return peer == options_.rank ? arena_->mapping() : *peers_[static_cast<std::size_t>(peer)].memory;
}

// -- groups
// ---------------------------------------------------------------------------------------------------------

std::shared_ptr<Group> Context::make_group(Group::Options options) {
  auto group = std::make_shared<Group>(shared_from_this(), std::move(options));
  std::vector<int> others = group->ranks();
  std::erase(others, rank());
  std::vector<Pending> early;
  {
    std::lock_guard lock(groups_mutex_);
    messenger_.open(group->ident(), std::move(others));
    groups_.push_back(group);
    auto mine = std::stable_partition(early_.begin(), early_.end(),
                                      [&](const Pending& p) { return p.header.group != group->ident(); });
    early.assign(std::make_move_iterator(mine), std::make_move_iterator(early_.end()));
    early_.erase(mine, early_.end());
  }
  for (auto [from, flaw] : messenger_.flawed(group->ident(), group->ranks()))
    refuse(*group, from->peer(), flaw);
  for (auto& pending : early) deliver(*group, pending.peer, pending.header, pending.text);
  for (std::size_t p = 0; p < peers_.size(); ++p) {
    int state = peers_[p].state.load();
    int rank = group->rank_of(static_cast<int>(p));
    if (rank < 0 || state == Peer::kAlive) continue;
    messenger_.left(group->ident(), static_cast<int>(p));
    if (state == Peer::kLost)
      group->on_peers_lost(
          {{static_cast<int>(p), "it was lost before the group was made", ErrorCode::kPeerLost}});
    else
      group->on_peer_closed(rank, 0, state == Peer::kEnded ? kProgramEnded : kByChoice);
  }
  return group;
}

// A closed group stays until all members have closed it, or were told why it broke: until then they may look
// for its block, and read what this member published in operations that it has finished.
void Context::drop_groups() {
  std::vector<std::shared_ptr<Group>> dropped;
  std::lock_guard lock(groups_mutex_);
  std::erase_if(groups_, [&](const std::shared_ptr<Group>& group) {
    if (!group->closed() || !(group->all_told() || group->all_peers_gone())) return false;
    dropped.push_back(group);
    return true;
  });
}

std::vector<std::shared_ptr<Group>> Context::groups() {
  std::lock_guard lock(groups_mutex_);
  return groups_;
}

std::shared_ptr<Group> Context::find(std::uint64_t ident) {
  for (auto& group : groups_)
    if (group->ident() == ident) return group;
  return nullptr;
}

// -- progress
// -------------------------------------------------------------------------------------------------------

bool Context::poll_rings() {
  bool any = false;
  for (int rank : ring_peers_) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (peer.ring->readable()) any |= peer.ring->receive();
    if (peer.ring->backlog()) any |= peer.ring->flush();
  }
  return any;
}

bool Context::progress(bool& waiting) {
  bool moved = poll_rings();
  for (auto& group : groups()) moved |= group->lanes().progress(waiting);
  return moved;
}

void Context::check(std::int64_t now, std::int64_t& next) {
  for (auto& group : groups()) group->check(now, next);
}

void Context::submitted(bool large) {
  submissions_.fetch_add(1, std::memory_order_seq_cst);
  if (large || deep_.load(std::memory_order_seq_cst)) bell().wake();
}

bool Context::wait(Operation& op, std::int64_t until) {
  if (op.done()) return true;
  struct Attention {
    Operation& op;
    explicit Attention(Operation& o) : op(o) { op.group().lanes().add_waiter(op); }
    ~Attention() { op.group().lanes().remove_waiter(op); }
  } attention(op);
  Driving driving(*this);
  int idle = 0;
  std::int64_t give_up = 0;
  while (true) {
    bool moved = op.group().lanes().drive(op);
    if (op.done()) return true;
    if ((idle & 15) == 0) moved |= poll_rings();
    if ((idle & 15) == 0 || idle > spins_) moved |= poll_sockets();
    if (moved) {
      idle = 0;
      continue;
    }
    if (idle < spins_) {
      ++idle;
      pause_cpu();
      continue;
    }
    std::int64_t now = now_ns();
    if (idle++ == spins_) give_up = now + patience_;
    if (now < give_up) {
      sched_yield();
      continue;
    }
    if (now >= until) return false;
    std::int64_t next = std::min(until, now + 100 * kMillisecond);
    op.group().check(now, next);
    Doorbell::Sleeper sleeper(bell(), Wake::Any);
    driving.pause();
    moved = op.group().lanes().drive(op) || poll_rings();
    if (op.done()) return true;
    if (!moved) sleeper.sleep(next - now);
    driving.resume();
    idle = moved ? 0 : spins_;  // woken: what was rung for is there, or is not for us
  }
}

void Context::progress_loop() {
  std::uint64_t seen = 0;
  std::int64_t active_until = 0, trim_at = 0;
  while (!stop_.load(std::memory_order_acquire)) {
    bool waiting = false;
    if (progress(waiting)) continue;
    std::int64_t now = now_ns();
    std::uint64_t submissions = submissions_.load(std::memory_order_acquire);
    if (submissions != seen) {
      seen = submissions;
      active_until = now + kActive;
    }
    std::int64_t next = std::numeric_limits<std::int64_t>::max();
    check(now, next);
    if (now >= trim_at && !arena_->trim(now - kWarm)) trim_at = now + kWarm / 4;
    bool active = now < active_until;
    deep_.store(!active && !waiting, std::memory_order_seq_cst);
    {
      Doorbell::Sleeper sleeper(bell(), waiting ? Wake::Any : Wake::Link);
      bool still = false;
      bool moved = progress(still);
      if (!moved && still == waiting && submissions_.load(std::memory_order_seq_cst) == seen &&
          !stop_.load()) {
        std::int64_t nap = waiting ? 50 * kMillisecond : active ? look_in_ : 1000 * kMillisecond;
        sleeper.sleep(std::min(nap, next - now));
      }
    }
    deep_.store(false, std::memory_order_relaxed);
  }
}

// -- completions
// ----------------------------------------------------------------------------------------------------

void Context::announce(std::uint64_t ticket) {
  std::lock_guard lock(completions_mutex_);
  completions_.push_back(ticket);
  completions_ready_.notify_one();
}

std::vector<std::uint64_t> Context::completions(std::int64_t timeout) {
  std::unique_lock lock(completions_mutex_);
  completions_ready_.wait_for(lock, std::chrono::nanoseconds(timeout),
                              [&] { return !completions_.empty() || stop_.load(); });
  std::vector<std::uint64_t> tickets(completions_.begin(), completions_.end());
  completions_.clear();
  return tickets;
}

// -- frames
// ---------------------------------------------------------------------------------------------------------

Destination Context::on_header(Link& link, const FrameHeader& header) {
  if (header.type == FrameType::kMessage) {
    // A peer that was given up stays lost, even if its process was only stopped and runs again.
    if (peers_[static_cast<std::size_t>(link.peer())].state.load() == Peer::kLost) return {};
    std::unique_lock lock(groups_mutex_);
    auto group = find(header.group);
    // Under the lock: who makes the group looks through its early messages after the group is to be found.
    if (!group) return messenger_.on_message(link, header);
    lock.unlock();
    if (const char* flaw = flaw_in_group(header, link.peer(), group->ranks())) {
      link.refuse(flaw);
      return {};
    }
    if ((header.channel & kPointToPoint) == 0) group->inquiry().seen(header.channel, header.call);
    return messenger_.on_message(link, header);
  }
  if (header.type == FrameType::kMore) return messenger_.on_more(link, header);
  auto& text = peers_[static_cast<std::size_t>(link.peer())].text;
  text.resize(header.payload);
  return {text.data(), nullptr};
}

void Context::on_frame(Link& link, const FrameHeader& header, const Destination& destination) {
  switch (header.type) {
    case FrameType::kMessage:
    case FrameType::kMore:
      messenger_.on_payload(link, header, destination);
      return;
    case FrameType::kGrant:
      link.granted(header.message, header.code == kDeclined);
      return;
    case FrameType::kWithdrawn:
      messenger_.on_withdrawn(link, header);
      return;
    case FrameType::kCredit:
      link.credited(header.total);
      return;
    case FrameType::kBye:
      departed(link.peer(), static_cast<Departure>(header.code));
      return;
    case FrameType::kHeartbeat:
      return;
    default:
      break;
  }
  auto& bytes = peers_[static_cast<std::size_t>(link.peer())].text;
  std::string text(reinterpret_cast<const char*>(bytes.data()), header.payload);
  if (header.type == FrameType::kGroupClosed) link.forget(header.group);
  // Under the lock, as it is made and dropped: a group that is not found is yet to be made, unless it is
  // known.
  std::unique_lock lock(groups_mutex_);
  auto group = find(header.group);
  if (!group) {
    if (!messenger_.known(header.group)) return keep_early(link.peer(), header, std::move(text));
    if (header.type == FrameType::kGroupClosed) messenger_.left(header.group, link.peer());
    return;
  }
  lock.unlock();
  deliver(*group, link.peer(), header, text);
}

// Keeps what the group will have to know when it is made: that a peer ended it, or asks for a reply.  A
// comparison of calls can wait for nothing, since none was made here.
void Context::keep_early(int peer, const FrameHeader& header, std::string text) {
  if (header.type == FrameType::kCallReply) return;
  if (header.type == FrameType::kCallQuery && header.code == kKnown) return;
  auto cost = [](const Pending& p) { return sizeof p + p.text.size(); };
  std::size_t sum = 0;
  for (Pending& p : early_) {
    if (p.peer != peer) continue;
    sum += cost(p);
    if (p.header.group != header.group || p.header.type != header.type) continue;
    if (header.type == FrameType::kGroupClosing && p.header.code != header.code) continue;
    if (header.type == FrameType::kCallQuery) p.header = header;  // the last question
    return;                                                       // the first cause
  }
  early_.push_back({peer, header, std::move(text)});
  sum += cost(early_.back());
  while (sum > kMostEarly) {
    auto oldest =
        std::find_if(early_.begin(), early_.end(), [&](const Pending& p) { return p.peer == peer; });
    sum -= cost(*oldest);
    early_.erase(oldest);
  }
}

// Ends the connection to a peer whose frame cannot be what its group would be sent.  The peer may have left
// by the time that the group is made: then there is no connection to end, and nobody else to tell the group.
void Context::refuse(Group& group, int peer, const char* flaw) {
  link(peer)->refuse(flaw);
  group.on_peers_lost({{peer, std::string("it sent ") + flaw, ErrorCode::kWire}});
}

// Hands a control frame to its group, at once or when the group is made.
void Context::deliver(Group& group, int peer, const FrameHeader& header, const std::string& text) {
  const char* flaw = flaw_in_group(header, peer, group.ranks());
  if (flaw == nullptr && header.type == FrameType::kBroken) flaw = flaw_of_text(text, group.size());
  if (flaw != nullptr) return refuse(group, peer, flaw);
  const int source = static_cast<int>(header.source);
  switch (header.type) {
    case FrameType::kCallQuery:
      group.inquiry().on_query(source, header);
      break;
    case FrameType::kCallReply:
      group.inquiry().on_reply(source, header);
      break;
    case FrameType::kBroken:
      group.on_broken(source, static_cast<ErrorCode>(header.code), text);
      break;
    case FrameType::kGroupClosing:
      group.on_peer_closing(source, header.channel, header.code == kHasRead);
      break;
    case FrameType::kGroupClosed:
      messenger_.left(group.ident(), peer);
      group.on_peer_closed(source, header.channel, static_cast<Departure>(header.code));
      drop_groups();
      break;
    default:
      break;
  }
}

}  // namespace shoal
