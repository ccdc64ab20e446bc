#include "rpc/endpoint.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "common/clock.h"
#include "common/descriptors.h"

namespace shoal {
namespace {

constexpr std::size_t kLosses = 4096;  // number of losses remembered

// -- forks: the child closes its copies of the descriptors ------------------------------------------

std::mutex posts_mutex;
std::vector<RpcEndpoint*> endpoints;
std::atomic<unsigned> generation{0};

void before_fork() {
  posts_mutex.lock();
  for (RpcEndpoint* endpoint : endpoints) {
    endpoint->peers_mutex().lock();
    endpoint->before_fork();
  }
}
void after_fork() {
  for (RpcEndpoint* endpoint : endpoints) endpoint->peers_mutex().unlock();
  posts_mutex.unlock();
}
void in_child() {
  generation.fetch_add(1);
  for (RpcEndpoint* endpoint : endpoints) endpoint->disown();
  after_fork();
  endpoints.clear();
}

void add_endpoint(RpcEndpoint* endpoint) {
  static const int registered = [] {
    watch_forks();
    return pthread_atfork(before_fork, after_fork, in_child);
  }();
  (void)registered;
  std::lock_guard lock(posts_mutex);
  endpoints.push_back(endpoint);
}

}  // namespace

RpcEndpoint::RpcEndpoint(Options options)
    : options_(options), generation_(generation.load()), heartbeat_(options.heartbeat) {
  budget_ = std::make_shared<Budget>(options.budget, [this] {
    room_.store(true);
    wake();
  });
  buffers_ = std::make_shared<BufferPool>([budget = budget_] { return budget->left(); }, [this] { wake(); });
  try {
    epoll_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
    wakeup_ = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
    watch_fd(epoll_, wakeup_, kWakeup);
  } catch (...) {
    close_all({&epoll_, &wakeup_});
    throw;
  }
  try {
    lender_ = std::make_shared<SharedBufferPool>(options.budget, [this] { wake(); });
  } catch (const OutOfMemory&) {  // all parts are sent through sockets
  }
  add_endpoint(this);
  heartbeat_.start(now_ns());
  thread_ = new std::thread([this] {
    pthread_setname_np(pthread_self(), "shoal-rpc");
    run();
  });
}

RpcEndpoint::~RpcEndpoint() { close(now_ns()); }

bool RpcEndpoint::foreign() const { return generation_ != generation.load(std::memory_order_relaxed); }

void RpcEndpoint::disown() {
  for (auto& [id, peer] : peers_) {
    peer->link.disown();
    close_all({&peer->pidfd});
  }
  for (auto& [id, pidfd] : departed_) close_all({&pidfd});
  departed_.clear();
  buffers_->disown();
  if (lender_) lender_->disown();
  close_all({&epoll_, &wakeup_});
}

void RpcEndpoint::wake() {
  const std::uint64_t one = 1;
  (void)!write(wakeup_, &one, sizeof one);
}

// -- peers ------------------------------------------------------------------------------------------

int RpcEndpoint::attach(int fd, int pid, std::int64_t ticket, int memory) {
  std::lock_guard lock(peers_mutex_);
  const int id = ++last_peer_;
  int pidfd = -1;
  std::shared_ptr<PeerBuffer> borrowed;
  try {
    if (closed()) throw std::system_error(ECONNABORTED, std::generic_category(), "the endpoint is closed");
    if (memory >= 0) borrowed = memories_.open(memory);
    if (pid > 0) pidfd = open_pidfd(pid);  // if there is none, only the end of the connection is noticed
    if (pidfd >= 0) watch_fd(epoll_, pidfd, kPidfd | static_cast<std::uint64_t>(id));
  } catch (...) {
    close_all({&fd, &pidfd, &memory});
    throw;
  }
  close_all({&memory});
  auto peer = std::make_shared<Peer>(*this, id, fd, epoll_, ticket);
  peer->local = pid > 0;
  peer->pidfd = pidfd;
  peer->borrowed = std::move(borrowed);
  // Blocks lent to a process that cannot be watched might never be returned.
  if (peer->borrowed && pidfd >= 0) peer->lender = lender_;
  peers_.emplace(id, peer);
  wake();  // heartbeats may have to begin
  return id;
}

std::shared_ptr<Peer> RpcEndpoint::find(int peer) {
  std::lock_guard lock(peers_mutex_);
  auto found = peers_.find(peer);
  return found == peers_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Peer>> RpcEndpoint::all_peers() {
  std::lock_guard lock(peers_mutex_);
  std::vector<std::shared_ptr<Peer>> all;
  for (auto& [id, peer] : peers_) all.push_back(peer);
  return all;
}

// The endpoint's thread sees the end of the connection after it has read everything before.
void RpcEndpoint::drop(int id, std::string why) {
  std::lock_guard lock(peers_mutex_);
  auto found = peers_.find(id);
  if (found == peers_.end()) return;
  dropped_.emplace(id, std::move(why));
  found->second->link.disconnect();
}

void RpcEndpoint::disconnect(int id) {
  std::lock_guard lock(peers_mutex_);
  if (auto found = peers_.find(id); found != peers_.end()) found->second->link.disconnect();
}

std::string RpcEndpoint::why_lost(int id) {
  std::lock_guard lock(peers_mutex_);
  auto found = losses_.find(id);
  return found == losses_.end() ? "" : found->second;
}

std::optional<std::string> RpcEndpoint::lost(int id) {
  if (find(id)) return std::nullopt;
  return why_lost(id);
}

// Called in the endpoint's thread, but not from within the link.
void RpcEndpoint::lose(Peer& gone, std::string why) {
  const auto peer = gone.shared_from_this();
  {
    std::lock_guard lock(peers_mutex_);
    if (peers_.find(peer->id) == peers_.end()) return;
    if (auto dropped = dropped_.find(peer->id); dropped != dropped_.end()) {
      why = std::move(dropped->second);
      dropped_.erase(dropped);
    }
    losses_[peer->id] = why;
    if (losses_.size() > kLosses) losses_.erase(losses_.begin());
    peers_.erase(peer->id);
    made_to_lost_ += peer->made();
    // With the lock held, so that a fork finds each descriptor either open and registered, or closed.
    if (peer->pidfd >= 0) departed_.emplace(peer->id, std::exchange(peer->pidfd, -1));
    peer->link.close();
  }
  peer->arrivals.clear();
  std::vector<CallPtr> pending;
  std::vector<std::shared_ptr<ReceivedCall>> handled;
  peer->lose(pending, handled);
  for (const CallPtr& call : pending)
    if (call->claim()) ended(*peer, call, closed() ? CallEnd::kClosed : CallEnd::kLost, why, nullptr);
  for (auto& handling : handled) handling->withdraw_reply(tickets_);
  release_peer_buffers(peer->id, false);
  tickets_.add(peer->ticket);
}

int RpcEndpoint::memory() {
  const auto from = lender();
  return from ? checked(fcntl(from->fd(), F_DUPFD_CLOEXEC, 0), "fcntl") : -1;
}

std::shared_ptr<SharedBufferPool> RpcEndpoint::lender() {
  std::lock_guard lock(peers_mutex_);
  return lender_;
}

std::shared_ptr<std::byte> RpcEndpoint::part_to_send(std::uint64_t bytes) {
  const auto from = lender();
  auto reserved = from ? from->reserve(bytes) : nullptr;
  return reserved ? reserved : buffers_->take(bytes);
}

// Takes back blocks that a lost peer has not taken, or all if its process has `ended`; stops watching the
// process when it has no more blocks.
void RpcEndpoint::release_peer_buffers(int id, bool ended) {
  const auto from = lender();
  if (from) ended ? from->ended(id) : from->lost(id);
  if (from && from->owes(id)) return;
  std::lock_guard lock(peers_mutex_);
  auto found = departed_.find(id);
  if (found == departed_.end()) return;
  close_all({&found->second});
  departed_.erase(found);
}

// -- calls ------------------------------------------------------------------------------------------

bool RpcEndpoint::await_room(int id, std::uint64_t bytes, std::int64_t until, bool stage) {
  const auto peer = find(id);
  return !peer || peer->await_room(bytes, until, stage);
}

void RpcEndpoint::unstage(int id, std::uint64_t bytes) {
  if (const auto peer = find(id)) peer->unstage(bytes);
}

template <class Submit>
CallPtr RpcEndpoint::begin(int id, std::int64_t deadline, bool no_room, std::string shown, Submit submit) {
  auto call = std::make_shared<Call>(id, deadline, std::move(shown));
  call->unique = calls_.fetch_add(1, std::memory_order_relaxed) + 1;
  const auto peer = find(id);
  if (!closed() && peer) {
    if (no_room) {
      call->claim();
      call->end(CallEnd::kTimeout, peer->queue_full_reason(now_ns()), nullptr, tickets_);
      return call;
    }
    if (submit(*peer, call)) {
      if (deadline != 0) set_deadline(call, deadline);
      if (call->claimed()) forget_deadline(*call);
      return call;
    }
  }
  call->claim();
  if (closed())
    call->end(CallEnd::kClosed, "the endpoint is closed", nullptr, tickets_);
  else
    call->end(CallEnd::kLost, why_lost(id), nullptr, tickets_);
  return call;
}

CallPtr RpcEndpoint::request(int id, const PacketContents& contents, std::int64_t deadline, bool no_room,
                             std::string shown) {
  return begin(id, deadline, no_room, std::move(shown),
               [&](Peer& peer, const CallPtr& call) { return peer.submit(peer.compose(contents), call); });
}

CallPtr RpcEndpoint::hold(int id, std::uint32_t mailbox, std::int64_t deadline, bool no_room, bool one_way,
                          std::string shown) {
  return begin(id, deadline, no_room, std::move(shown),
               [&](Peer& peer, const CallPtr& call) { return peer.hold(mailbox, call, one_way); });
}

bool RpcEndpoint::fill(Call& call, const PacketContents& contents) {
  const auto peer = find(call.peer);
  return peer && peer->fill(call, peer->compose(contents));
}

void RpcEndpoint::abandon_held(const CallPtr& call, std::string why) {
  if (!call->claim()) return;
  if (const auto peer = find(call->peer))
    return ended(*peer, call, CallEnd::kUnsent, std::move(why), nullptr);
  forget_deadline(*call);
  call->end(CallEnd::kUnsent, std::move(why), nullptr, tickets_);
}

bool RpcEndpoint::send(int id, const PacketContents& contents) {
  const auto peer = find(id);
  return peer && !closed() && peer->submit(peer->compose(contents), nullptr);
}

bool RpcEndpoint::reply(Packet& packet, const PacketContents& contents) {
  if (!packet.handling || packet.handling->state() != ReceivedCall::kRunning) return false;
  const auto peer = find(packet.peer);
  if (!peer) {
    packet.handling->advance(ReceivedCall::kRunning, ReceivedCall::kAnswered);
    return false;
  }
  // Throws before the state changes, so that a reply which cannot be sent does not count as an answer.
  OutgoingPacket outgoing = peer->compose(contents);
  if (!packet.handling->advance(ReceivedCall::kRunning, ReceivedCall::kAnswered)) return false;
  peer->answered(packet.call);
  if (packet.handling->cancelled()) return false;
  return peer->reply(std::move(outgoing), packet.call);
}

void RpcEndpoint::abandon(Packet& packet) {
  if (!packet.handling->advance(ReceivedCall::kRunning, ReceivedCall::kAnswered)) return;
  if (const auto peer = find(packet.peer)) peer->answered(packet.call);
}

// The caller of this has claimed the call.
void RpcEndpoint::ended(Peer& peer, const CallPtr& call, CallEnd how, std::string text, PacketPtr reply) {
  peer.forget(*call);
  forget_deadline(*call);
  if (how == CallEnd::kNone)
    for (auto& message : call->take_sent()) peer.link.cancel(message);
  else
    peer.stop_sending(*call);
  call->end(how, std::move(text), std::move(reply), tickets_);
}

bool RpcEndpoint::cancel(const CallPtr& call) {
  if (!call->claim()) return false;
  const auto peer = find(call->peer);
  if (!peer) {  // it is lost, but its loss has not reached this call yet
    forget_deadline(*call);
    call->end(CallEnd::kCancelled, "cancelled", nullptr, tickets_);
    return true;
  }
  ended(*peer, call, CallEnd::kCancelled, "cancelled", nullptr);
  peer->control(FrameType::kCancelCall, call->number);
  return true;
}

RpcEndpoint::Stats RpcEndpoint::stats() {
  Stats stats{};
  std::vector<std::shared_ptr<Peer>> peers;
  {
    std::lock_guard lock(peers_mutex_);
    stats.made = made_to_lost_;
    for (auto& [id, peer] : peers_) peers.push_back(peer);
  }
  for (auto& peer : peers) {
    ++stats.peers;
    stats.calls += peer->all_pending().size();
    stats.handled += peer->handled();
    stats.made += peer->made();
    stats.queued += peer->queued();
  }
  stats.packets = inbox_.waiting();
  stats.granted = budget_->used();
  stats.kept = buffers_->kept();
  if (const auto from = lender()) stats.lent = from->lent();
  return stats;
}

std::vector<CallPtr> RpcEndpoint::pending() {
  std::vector<CallPtr> all;
  for (auto& peer : all_peers()) {
    auto theirs = peer->all_pending();
    all.insert(all.end(), theirs.begin(), theirs.end());
  }
  return all;
}

std::vector<RpcEndpoint::Handled> RpcEndpoint::handled() {
  std::vector<Handled> all;
  for (auto& peer : all_peers())
    for (auto& [number, handling] : peer->all_handled())
      all.push_back({peer->id, number, handling->status()});
  return all;
}

// -- the end ----------------------------------------------------------------------------------------

std::vector<int> RpcEndpoint::close(std::int64_t deadline) {
  if (foreign()) return {};
  std::lock_guard once(close_mutex_);
  if (std::exchange(closed_, true)) return {};
  {
    std::lock_guard lock(peers_mutex_);
    closing_.store(true, std::memory_order_release);
  }
  inbox_.close();
  auto peers = all_peers();
  for (auto& peer : peers)
    for (const CallPtr& call : peer->all_pending())
      if (call->claim()) {
        ended(*peer, call, CallEnd::kClosed, "the endpoint was closed", nullptr);
        peer->control(FrameType::kCancelCall, call->number);
      }
  auto sent = [&] {
    return std::all_of(peers.begin(), peers.end(), [](auto& peer) { return peer->all_sent(); });
  };
  while (!sent() && now_ns() < deadline) usleep(200);
  std::vector<int> late;
  for (auto& peer : peers)
    if (!peer->all_sent()) late.push_back(peer->id);
  FrameHeader bye;
  bye.type = FrameType::kBye;
  for (auto& peer : peers) peer->link.send_control(bye);
  while (!sent() && now_ns() < deadline) usleep(200);
  stop_.store(true, std::memory_order_release);
  wake();
  thread_->join();
  delete std::exchange(thread_, nullptr);
  for (auto& peer : peers) peer->link.drain(deadline, heartbeat_.limit());
  budget_->forget();
  {
    std::lock_guard lock(peers_mutex_);
    if (lender_) lender_->forget();
    lender_.reset();  // receivers keep their blocks, and can take those that are in flight
  }
  buffers_->close();
  for (auto& peer : peers) lose(*peer, "the endpoint was closed");
  peers.clear();
  tickets_.close();
  std::lock_guard lock(posts_mutex);
  std::erase(endpoints, this);
  for (auto& [id, pidfd] : departed_) close_all({&pidfd});
  departed_.clear();
  close_all({&epoll_, &wakeup_});
  return late;
}

}  // namespace shoal
