#include "engine/context.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <new>

#include "common/clock.h"
#include "net/check.h"

namespace shoal {
namespace {

// Maximum bytes kept of one peer's frames for groups that do not exist here yet.
constexpr std::size_t kMostEarly = 1 << 20;
// Maximum wait for threads that are reporting losses.
constexpr std::int64_t kLossReportTimeout = kSecond;
// Maximum bytes of unused memory of operations.
constexpr std::uint64_t kMaxKeptBuffers = 128 << 20;

int cores() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

// Nanoseconds between two checks of the local peers, while operations are pending and while none are.
std::int64_t peer_check_interval(int ranks) {
  return 20 * kMillisecond * std::max(1, (ranks + cores() - 1) / cores());
}
std::int64_t idle_peer_check_interval(int ranks) {
  return std::max(peer_check_interval(ranks), 250 * kMillisecond);
}

}  // namespace

Context::Context(Options options)
    : options_(options),
      arena_(std::make_shared<Arena>(options.capacity, options.limit)),
      buffers_(std::make_shared<BufferPool>([] { return kMaxKeptBuffers; })),
      quarantine_(arena_),
      lowest_local_(options.rank),
      peer_check_interval_(shoal::peer_check_interval(options.local_size)),
      idle_peer_check_interval_(shoal::idle_peer_check_interval(options.local_size)),
      peers_(*this, options.rank, options.size, options.heartbeat, idle_peer_check_interval_),
      messenger_(buffers_) {
  std::uint64_t offset = arena_->allocate(sizeof(ArenaHeader));  // the first allocation: offset 0
  header_ = new (arena_->mapping().base() + offset) ArenaHeader;
  const std::uint64_t status = arena_->allocate(sizeof(StatusPage));
  status_ = new (arena_->mapping().base() + status) StatusPage;
  status_->pid = getpid();
  status_->rank = options_.rank;
  status_->size = options_.size;
  copy_text(status_->job, options_.job);
  status_->started = now_ns();
  if (options_.world == nullptr) worlds_made_.fetch_add(1);  // after its memory, for which readers then look
  header_->status.store(status, std::memory_order_release);
  // Spin only if every rank of the host has a core; otherwise yield the core a few times, then sleep.
  bool roomy = options_.local_size <= cores();
  // Sleeping too early costs a wake-up on each side, and two sleeping sides never find each other awake
  // again.
  spins_ = roomy ? 1024 : 0;  // a multiple of 16: a woken waiter reads the rings at once
  yield_time_ = roomy ? kMillisecond : kMillisecond / 5;
  // The progress threads check once per millisecond and core, not per rank: 64 ranks would saturate 2 cores.
  progress_interval_ = kMillisecond * std::max(1, options_.local_size / cores());
}

Context::~Context() {
  if (!forked_ && started_ && !closed_) close(now_ns());
  messenger_.clear();  // before the links
}

void Context::start() {
  started_ = true;
  peers_.start(now_ns());
  if (options_.world != nullptr) {
    std::lock_guard lock(options_.world->groups_mutex_);
    options_.world->parts_.push_back(weak_from_this());
  } else if (peers_.remote()) {
    const auto ranks = static_cast<std::size_t>(options_.size);
    status_->remote = arena_->allocate(ranks * sizeof(StatusRemote));
    remote_ = new (arena_->mapping().base() + status_->remote) StatusRemote[ranks];
  }
  // Signals must reach the program's threads: they interrupt its system calls and run its handlers.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int i = 0; i < options_.progress_threads; ++i) {
      progress_threads_.emplace_back([this, i] { progress_loop(i == 0); });
      pthread_setname_np(progress_threads_.back().native_handle(), "shoal-progress");
    }
    watch_thread_ = std::thread([this] { watch_loop(); });
  } catch (...) {  // no more threads; those that were started end when the context is closed
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(watch_thread_.native_handle(), "shoal-watch");
}

void Context::close(std::int64_t deadline) {
  if (!started_ || closed_ || forked_) return;
  closed_ = true;
  peers_.say_goodbye(departure(), deadline);
  stop_.store(true, std::memory_order_release);
  bell().wake();
  peers_.wake();
  tickets_.close();
  for (std::thread& thread : progress_threads_) thread.join();
  if (watch_thread_.joinable()) watch_thread_.join();
  if (options_.world != nullptr) options_.world->end_part(*this);
  write_status(now_ns());
  peers_.close();
  buffers_->close();
  std::lock_guard lock(groups_mutex_);
  groups_.clear();
  moving_library_.reset();
}

void Context::disown() {
  forked_ = true;
  monitor_idle_ = false;
  arena_->disown();
  buffers_->disown();
  peers_.disown();
  // The threads exist only in the parent.
  for (std::thread& thread : progress_threads_) thread.detach();
  if (watch_thread_.joinable()) watch_thread_.detach();
}

std::tuple<std::size_t, std::size_t, std::size_t, std::uint64_t> Context::held() {
  auto [groups, messages] = messenger_.held();
  const std::uint64_t lent = peers_.lent();
  std::lock_guard lock(groups_mutex_);
  return {groups, messages, early_.size(), lent};
}

// -- groups ---------------------------------------------------------------------------------------

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
  for (int member = 0; member < group->size(); ++member) {
    const int peer = group->global(member);
    const Peers::State state = peers_.state(peer);
    if (state == Peers::kAlive) continue;
    messenger_.left(group->ident(), peer);
    if (state != Peers::kLost) quarantine_.left(group->ident(), peer);
    if (state == Peers::kLost)
      group->on_peers_lost(
          {{peer, "it was lost before the group was made", ErrorCode::kPeerLost, peers_.dead(peer)}});
    else
      group->on_peer_closed(member, 0, state == Peers::kEnded ? kProgramEnded : kByChoice);
  }
  return group;
}

// A closed group is kept until all members have closed it or know why it broke: until then they may look up
// its block, and read the data that this member published in completed operations.
void Context::drop_groups() {
  std::vector<std::shared_ptr<Group>> dropped;
  std::lock_guard lock(groups_mutex_);
  std::erase_if(groups_, [&](const std::shared_ptr<Group>& group) {
    if (!group->closed() || !(group->failure_announced() || group->all_peers_gone())) return false;
    keep_counters(*group);
    dropped.push_back(group);
    return true;
  });
}

std::vector<std::shared_ptr<Group>> Context::groups() {
  std::lock_guard lock(groups_mutex_);
  return groups_;
}

std::shared_ptr<MovingLibrary> Context::moving_library() {
  std::lock_guard lock(groups_mutex_);
  return moving_library_;
}

void Context::use(std::shared_ptr<MovingLibrary> library) {
  {
    std::lock_guard lock(groups_mutex_);
    moving_library_ = std::move(library);
  }
  bell().wake();
}

std::shared_ptr<Group> Context::find(std::uint64_t ident) {
  for (auto& group : groups_)
    if (group->ident() == ident) return group;
  return nullptr;
}

// -- peers that leave or are lost -----------------------------------------------------------------

void Context::lost(Loss loss) {
  struct Telling {
    std::atomic<int>& count;
    explicit Telling(std::atomic<int>& c) : count(c) { count.fetch_add(1); }
    ~Telling() { count.fetch_sub(1); }
  } telling(reporting_losses_);
  if (peers_.mark_lost(loss)) {
    std::vector<Loss> losses{std::move(loss)};
    for (Loss& other : peers_.ended()) losses.push_back(std::move(other));  // several often end together
    report_to_groups(losses);
  } else if (loss.dead) {  // a known loss turns out to be a death
    for (auto& group : groups())
      if (const int rank = group->rank_of(loss.peer); rank >= 0) group->agreements().lose(rank, true);
  }
  bell().wake();
}

void Context::report_to_groups(const std::vector<Loss>& losses) {
  bool silent = false;  // a group does not notify lost members, which may still run
  for (auto& group : groups()) silent |= group->on_peers_lost(losses);
  for (const Loss& loss : losses) {
    messenger_.gone(loss.peer);
    if (silent && peers_.remote(loss.peer)) peers_.disconnect(loss.peer);
  }
  bell().wake();  // receives may have been posted again
  drop_groups();
}

void Context::look_for_deaths() {
  if (forked_ || closed()) return;
  poll_sockets();
  const std::vector<Loss> losses = peers_.ended();
  if (!losses.empty()) report_to_groups(losses);
  const std::int64_t until = now_ns() + kLossReportTimeout;
  while ((peers_.breaking() || reporting_losses_.load() > 0) && now_ns() < until) usleep(100);
}

std::vector<int> Context::all_lost() {
  look_for_deaths();
  return peers_.all_lost();
}

void Context::on_link_lost(Link& link, LinkEnd end, const char* why) {
  if (end == LinkEnd::kClosed) return lost({link.peer(), why});
  lost({link.peer(), std::string("it sent ") + why + "; the connection to it was cut", ErrorCode::kWire});
  peers_.disconnect(link.peer());  // notifies it immediately, although its data is no longer read
}

// A peer has closed a group.
void Context::left(std::uint64_t group, int peer) {
  messenger_.left(group, peer);
  quarantine_.left(group, peer);
}

void Context::on_peer_left(int rank, Departure why) {
  if (!peers_.mark_left(rank, why)) return;
  for (auto& group : groups())
    if (int member = group->rank_of(rank); member >= 0) group->on_peer_closed(member, 0, why);
  messenger_.gone(rank);
  drop_groups();
}

// -- frames ---------------------------------------------------------------------------------------

Destination Context::on_header(Link& link, const FrameHeader& header) {
  if (header.type == FrameType::kMessage) {
    // An evicted peer stays lost, even if its process was only stopped and runs again.
    if (peers_.state(link.peer()) == Peers::kLost) return {};
    std::unique_lock lock(groups_mutex_);
    auto group = find(header.group);
    // Requires the lock: make_group() reads early messages after it has made the group findable.
    if (!group) return messenger_.on_message(link, header);
    lock.unlock();
    if (const char* flaw = flaw_in_group(header, link.peer(), group->ranks())) {
      link.refuse(flaw);
      return {};
    }
    if ((header.channel & kPointToPoint) == 0) group->inquiry().on_peer_call(header.channel, header.call);
    return messenger_.on_message(link, header);
  }
  if (header.type == FrameType::kMore) return messenger_.on_more(link, header);
  auto& text = peers_.text(link.peer());
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
      on_peer_left(link.peer(), static_cast<Departure>(header.code));
      return;
    case FrameType::kHeartbeat:
      keep_remote_status(link.peer(), peers_.text(link.peer()).data(), header.payload);
      return;
    default:
      break;
  }
  auto& bytes = peers_.text(link.peer());
  std::string text(reinterpret_cast<const char*>(bytes.data()), header.payload);
  if (header.type == FrameType::kGroupClosed) link.forget(header.group);
  // groups_mutex_ is held when a group is made or dropped: a group that is not found has yet to be made,
  // unless the messenger knows it.
  std::unique_lock lock(groups_mutex_);
  auto group = find(header.group);
  if (!group) {
    if (!messenger_.known(header.group)) return keep_early(link.peer(), header, std::move(text));
    if (header.type == FrameType::kGroupClosed) left(header.group, link.peer());
    return;
  }
  lock.unlock();
  deliver(*group, link.peer(), header, text);
}

// Keeps frames that a group needs when it is made: why a peer ended it, or queries that need a reply.
// Comparisons of calls are dropped, since no call was made here.
void Context::keep_early(int peer, const FrameHeader& header, std::string text) {
  if (header.type == FrameType::kCallReply) return;
  if (header.type == FrameType::kCallQuery && header.code == kKnown) return;
  auto cost = [](const Pending& p) { return sizeof p + p.text.size(); };
  std::size_t sum = 0;
  for (Pending& p : early_) {
    if (p.peer != peer) continue;
    sum += cost(p);
    if (p.header.group != header.group || p.header.type != header.type) continue;
    if (header.type == FrameType::kAgree) continue;  // keep all of them
    if (header.type == FrameType::kGroupClosing && p.header.code != header.code) continue;
    if (header.type == FrameType::kCallQuery) p.header = header;  // keep the last query
    return;                                                       // keep the first cause
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

// Ends the connection to a peer that sent a frame which its group does not allow.  If the peer has left
// before the group is made, there is no connection to end, so the group is notified here.
void Context::refuse(Group& group, int peer, const char* flaw) {
  link(peer)->refuse(flaw);
  group.on_peers_lost({{peer, std::string("it sent ") + flaw, ErrorCode::kWire}});
}

// Passes a control frame to its group, immediately or when the group is made.
void Context::deliver(Group& group, int peer, const FrameHeader& header, const std::string& text) {
  const char* flaw = flaw_in_group(header, peer, group.ranks());
  Error error;
  if (flaw == nullptr && header.type == FrameType::kBroken) flaw = decode(text, group.size(), error);
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
      error.code = static_cast<ErrorCode>(header.code);
      group.on_broken(source, std::move(error));
      break;
    case FrameType::kAgree:
      if ((flaw = group.agreements().on_frame(source, header, text)) != nullptr) refuse(group, peer, flaw);
      break;
    case FrameType::kGroupClosing:
      group.on_peer_closing(source, header);
      break;
    case FrameType::kGroupClosed:
      left(group.ident(), peer);
      group.on_peer_closed(source, header.channel, static_cast<Departure>(header.code));
      drop_groups();
      break;
    default:
      break;
  }
}

}  // namespace shoal
