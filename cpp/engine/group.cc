#include "engine/group.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/clock.h"
#include "engine/context.h"
#include "engine/messages.h"

namespace shoal {
namespace {

constexpr std::size_t kRecent = 256;

}  // namespace

Group::Group(std::shared_ptr<Context> context, Options options)
    : context_(std::move(context)), options_(std::move(options)), recent_(kRecent) {
  departed_.assign(options_.ranks.size(), ~0ULL);
  program_ended_.assign(options_.ranks.size(), false);
  leaving_members_.resize(options_.ranks.size());
  std::vector<int> seen;
  for (int rank = 0; rank < size(); ++rank) {
    int host = options_.hosts[static_cast<std::size_t>(rank)];
    auto found = std::find(seen.begin(), seen.end(), host);
    std::size_t index = static_cast<std::size_t>(found - seen.begin());
    if (found == seen.end()) {
      seen.push_back(host);
      hosts_.emplace_back();
    }
    hosts_[index].push_back(rank);
    if (rank == options_.rank) host_ = static_cast<int>(index);
  }
  for (int i = 0; i < options_.lanes; ++i) {
    Lane& lane = lanes_.emplace_back();
    lane.index = i;
    lane.next = static_cast<std::uint64_t>(i);
  }
  const auto& mine = hosts_[static_cast<std::size_t>(host_)];
  if (mine.size() > 1 && !pairwise()) {
    int self = static_cast<int>(std::find(mine.begin(), mine.end(), rank()) - mine.begin());
    team_ = std::make_unique<Team>(*context_, ident(), mine, options_.ranks, self, options_.lanes);
  }
}

Group::~Group() = default;

int Group::rank_of(int global) const {
  auto found = std::find(options_.ranks.begin(), options_.ranks.end(), global);
  return found == options_.ranks.end() ? -1 : static_cast<int>(found - options_.ranks.begin());
}

Link* Group::link(int rank) const { return context_->link(global(rank)); }

// Remembers the call, for peers that ask.
void Group::note(Operation& op) {
  const std::uint64_t channel = op.request().channel;
  std::lock_guard lock(recent_mutex_);
  if (op.request().numbered()) {
    op.call_.history = history_;
    std::uint64_t words[sizeof(Fingerprint) / 8];
    std::memcpy(words, &op.call_, sizeof words);
    for (std::uint64_t word : words) history_ = (history_ ^ word ^ (history_ >> 29)) * 0x9e3779b97f4a7c15ULL;
    next_number_ = channel + 1;
  }
  recent_[channel % kRecent] = {channel, op.call_};
}

OperationPtr Group::submit(Request request) {
  auto op = std::make_shared<Operation>(shared_from_this(), std::move(request));
  const std::uint64_t channel = op->request().channel;
  if (op->request().collective()) note(*op);
  if (!op->request().numbered()) {
    auto lane = std::make_shared<Lane>();
    lane->queue.push_back(op);
    run(*lane, Effort::kBegin);
    if (!op->done()) {
      std::lock_guard lock(loose_mutex_);
      loose_.push_back({op, lane});
      loose_count_.store(static_cast<int>(loose_.size()), std::memory_order_relaxed);
    }
  } else {
    Lane& lane = lanes_[channel % lanes_.size()];
    {
      std::lock_guard lock(lane.mutex);
      lane.queue.push_back(op);
    }
    run(lane, Effort::kBegin);
  }
  if (!op->done()) context_->submitted(op->large());
  return op;
}

// Who finds the token taken may go to sleep, so its holder looks again before leaving: it may have looked
// last before what the other came for was there.
bool Group::run(Lane& lane, Effort effort) {
  bool moved = false;
  do {
    if (lane.token.test_and_set(std::memory_order_seq_cst)) {
      lane.missed.store(true, std::memory_order_seq_cst);
      if (lane.token.test_and_set(std::memory_order_seq_cst)) return moved;
    }
    if (lane.missed.load(std::memory_order_relaxed)) lane.missed.exchange(false, std::memory_order_seq_cst);
    moved |= run_held(lane, effort);
    lane.token.clear(std::memory_order_seq_cst);
    if (effort == Effort::kBegin && lane.missed.load(std::memory_order_seq_cst)) {
      context_->bell().wake();  // what the other came for may be what a submitter leaves alone
      return moved;
    }
  } while (lane.missed.load(std::memory_order_seq_cst));
  return moved;
}

// Under the token: runs the lane's operations in order until one must wait.
bool Group::run_held(Lane& lane, Effort effort) {
  bool moved = false;
  while (true) {
    OperationPtr op;
    {
      std::lock_guard lock(lane.mutex);
      if (!lane.queue.empty()) op = lane.queue.front();
    }
    if (!op) break;
    if (effort == Effort::kBegin && op->large()) {
      moved |= op->begin();
    } else {
      moved |= op->step();
      if (!op->done()) settle(*op);
    }
    if (!op->done()) break;
    moved = true;
    std::lock_guard lock(lane.mutex);
    lane.queue.pop_front();
  }
  return moved;
}

// An operation that cannot go on is told why, after one more look at what came before the bad news.
void Group::settle(Operation& op) {
  if (op.ending()) {
    op.step();
    if (op.done()) return;
    // A message that needs only our own buffers to get through does so.
    if (op.request().kind == Kind::kSend && Messages::hand_over(op)) op.step();
    if (!op.done()) op.fail(op.cause_);
    return;
  }
  if (broken()) {
    op.step();
    if (!op.done()) op.fail(*failure());
    return;
  }
  if (any_lost_.load(std::memory_order_acquire)) {
    if (auto error = lost_for(op)) {
      op.step();
      if (!op.done()) op.fail(std::move(*error));
      return;
    }
  }
  if (leaving_.load(std::memory_order_acquire)) {
    // Others of this group may still be completed, so this one alone ends.
    if (auto error = in_vain(op)) {
      op.step();
      if (op.done()) return;
      if (op.request().numbered()) give_up_from(op.request().channel);
      op.fail(std::move(*error));
    }
    return;
  }
  if (!any_departed_.load(std::memory_order_acquire)) return;
  if (auto rank = departed_for(op)) {
    op.step();
    if (op.done()) return;
    Error error{ErrorCode::kClosed, departure(*rank, op.request()), {*rank}};
    if (pairwise()) return op.fail(std::move(error));
    fail(std::move(error), true);
    op.fail(*failure());
  }
}

std::optional<int> Group::departed_for(Operation& op) {
  std::lock_guard lock(state_mutex_);
  const Request& request = op.request();
  auto is_gone = [&](int rank) { return departed_[static_cast<std::size_t>(rank)] != ~0ULL; };
  if (request.kind == Kind::kSend) return is_gone(request.peer) ? std::optional(request.peer) : std::nullopt;
  if (request.kind == Kind::kRecv && request.peer < 0) {
    if (op.received)
      if (const int source = op.received->from.load(std::memory_order_acquire); source >= 0)
        return is_gone(source) ? std::optional(source) : std::nullopt;  // the rest of it will not come
    int last = -1;
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      if (!is_gone(r)) return std::nullopt;
      last = r;
    }
    return last < 0 ? std::nullopt : std::optional(last);
  }
  if (request.kind == Kind::kRecv || request.keyed()) {
    for (int source : Messages::sources_of(op))
      if (is_gone(source)) return source;
    return std::nullopt;
  }
  for (int r = 0; r < size(); ++r)
    if (r != rank() && departed_[static_cast<std::size_t>(r)] <= request.channel) return r;
  return std::nullopt;
}

bool Group::drive(Operation& op) {
  const Request& request = op.request();
  if (request.numbered()) return run(lanes_[request.channel % lanes_.size()]);
  std::shared_ptr<Lane> lane;
  {
    std::lock_guard lock(loose_mutex_);
    for (auto& entry : loose_)
      if (entry.op.get() == &op) lane = entry.lane;
  }
  if (!lane) return false;
  bool moved = run(*lane);
  if (op.done()) {
    std::lock_guard lock(loose_mutex_);
    std::erase_if(loose_, [](const Loose& entry) { return entry.op->done(); });
    loose_count_.store(static_cast<int>(loose_.size()), std::memory_order_relaxed);
  }
  return moved;
}

void Group::attend(Operation& op, int change) {
  const Request& request = op.request();
  if (!request.numbered()) return;
  Lane& lane = lanes_[request.channel % lanes_.size()];
  lane.attended.fetch_add(change, std::memory_order_relaxed);
  if (change > 0) return;
  std::lock_guard lock(lane.mutex);
  if (!lane.queue.empty()) context_->submitted(false);  // the progress thread takes over what is left
}

bool Group::progress(bool& waiting) {
  bool moved = false;
  const bool all = broken();
  for (Lane& lane : lanes_) {
    if (!all && lane.attended.load(std::memory_order_relaxed) > 0) continue;
    {
      std::lock_guard lock(lane.mutex);
      if (lane.queue.empty()) continue;
    }
    moved |= run(lane);
    std::lock_guard lock(lane.mutex);
    waiting |= !lane.queue.empty();
  }
  if (loose_count_.load(std::memory_order_relaxed) == 0) return moved;
  std::vector<Loose> loose;
  {
    std::lock_guard lock(loose_mutex_);
    loose = loose_;
  }
  for (auto& entry : loose) moved |= run(*entry.lane);
  std::lock_guard lock(loose_mutex_);
  std::erase_if(loose_, [](const Loose& entry) { return entry.op->done(); });
  loose_count_.store(static_cast<int>(loose_.size()), std::memory_order_relaxed);
  waiting |= !loose_.empty();
  return moved;
}

bool Group::pending() {
  for (Lane& lane : lanes_) {
    std::lock_guard lock(lane.mutex);
    if (!lane.queue.empty()) return true;
  }
  std::lock_guard lock(loose_mutex_);
  return std::any_of(loose_.begin(), loose_.end(), [](const Loose& entry) { return !entry.op->done(); });
}

void Group::check(std::int64_t now, std::int64_t& next) {
  std::vector<OperationPtr> late, stalled;
  auto look = [&](const OperationPtr& op) {
    if (op->done()) return;
    if (op->deadline() <= now)
      late.push_back(op);
    else
      next = std::min(next, op->deadline());
  };
  auto ask = [&](const OperationPtr& op) {
    if (!op->request().collective() || op->done()) return;
    if (op->ask_at_ <= now) {
      op->ask_at_ = std::numeric_limits<std::int64_t>::max();
      stalled.push_back(op);
    }
    next = std::min(next, op->ask_at_);
  };
  for (Lane& lane : lanes_) {
    std::lock_guard lock(lane.mutex);
    for (auto& op : lane.queue) look(op);
    if (!lane.queue.empty()) ask(lane.queue.front());
  }
  if (loose_count_.load(std::memory_order_relaxed) > 0) {
    std::lock_guard lock(loose_mutex_);
    for (auto& entry : loose_) {
      look(entry.op);
      ask(entry.op);
    }
  }
  for (auto& op : stalled) compare_with_neighbour(*op);
  for (auto& op : late) {
    const Request& request = op->request();
    if (request.collective()) {
      begin_inquiry(request.channel, false, describe(request), request.timeout);
      continue;
    }
    Error error{ErrorCode::kTimeout,
                describe(request) + " did not finish within its timeout of " + seconds(request.timeout),
                {}};
    if (request.peer >= 0) error.ranks.push_back(request.peer);
    error.text +=
        request.kind == Kind::kRecv ? ": no matching message came" : ": the receiver took no notice of it";
    if (pairwise()) {
      op->end(std::move(error));
      drive(*op);
    } else {
      fail(std::move(error), true);
    }
  }
  bool over = false;
  {
    std::lock_guard lock(state_mutex_);
    if (inquiry_) {
      over = inquiry_->until <= now;
      if (!over) next = std::min(next, inquiry_->until);
    }
  }
  if (over) finish_inquiry();
}

std::optional<Error> Group::failure() {
  if (!broken()) return std::nullopt;
  std::lock_guard lock(state_mutex_);
  Error error = error_;
  error.completed = last_completed();
  return error;
}

std::int64_t Group::last_completed() const {
  std::uint64_t next = ~0ULL;
  for (const Lane& lane : lanes_) next = std::min(next, lane.next.load(std::memory_order_relaxed));
  return static_cast<std::int64_t>(next) - 1;
}

std::shared_ptr<Block> Group::allocate(std::size_t bytes) {
  auto block = std::make_shared<Block>(context_->arena(), bytes);
  std::lock_guard lock(state_mutex_);
  std::erase_if(blocks_, [](const auto& entry) { return entry.expired(); });
  if (broken()) block->quarantine();
  blocks_.push_back(block);
  return block;
}

bool Group::all_peers_gone() {
  std::lock_guard lock(state_mutex_);
  for (int r = 0; r < size(); ++r)
    if (r != rank() && departed_[static_cast<std::size_t>(r)] == ~0ULL && !context_->gone(global(r)))
      return false;
  return true;
}

FrameHeader Group::frame(FrameType type) const {
  FrameHeader header;
  header.type = type;
  header.group = ident();
  header.source = static_cast<std::uint32_t>(rank());
  return header;
}

// The farewell is a group's last word to its peers, because they forget the group by it.
void Group::tell_all(const FrameHeader& header, const std::string& text) {
  std::lock_guard lock(farewell_mutex_);
  if (said_farewell_) return;
  said_farewell_ = header.type == FrameType::kGroupClosed;
  for (int r = 0; r < size(); ++r) {
    Link* to = r == rank() ? nullptr : link(r);
    if (to != nullptr && !to->broken()) to->send_control(header, text.data(), text.size());
  }
}

}  // namespace shoal
