#include "net/link.h"

#include <algorithm>

#include "net/check.h"

namespace shoal {
namespace {

constexpr std::size_t kReadBatch = 16;                    // frames delivered before another link gets a turn
constexpr std::uint64_t kCreditBatch = kUnreadLimit / 2;  // bytes returned with one frame

std::uint64_t charge_of(const FrameHeader& header) {
  return header.code == kDeferred || header.code == kSharedBuffer ? 0 : header.payload + kHeaderCharge;
}

}  // namespace

Link::Push Link::push(Item& item) {
  const std::size_t whole = sizeof(FrameHeader) + item.bytes;
  while (item.written < whole) {
    iovec parts[2];
    int count = 0;
    std::size_t body = 0;
    if (item.written < sizeof(FrameHeader)) {
      parts[count++] = {reinterpret_cast<std::byte*>(&item.header) + item.written,
                        sizeof(FrameHeader) - item.written};
    } else {
      body = item.written - sizeof(FrameHeader);
    }
    if (item.bytes > body) parts[count++] = {const_cast<std::byte*>(item.data) + body, item.bytes - body};
    std::ptrdiff_t moved = write_some(parts, count);
    if (moved < 0) return Push::kBroken;
    if (moved == 0) return Push::kBlocked;
    item.written += static_cast<std::size_t>(moved);
  }
  return Push::kAll;
}

void Link::finish(Item& item) {
  if (!item.message || !item.last) return;
  item.message->done.store(true, std::memory_order_release);
  sink_.on_sent();
}

Charge::~Charge() {
  if (link_ != nullptr) link_->release(bytes_);
}

// The first part is sent immediately if the peer's window has room for it; otherwise only the header.
Link::Item Link::first_chunk(const std::shared_ptr<Outgoing>& message) {
  Item item;
  message->begun = true;
  message->header.type = FrameType::kMessage;
  const bool lent = message->header.code == kSharedBuffer;
  const std::uint64_t bytes = lent ? 0 : std::min<std::uint64_t>(message->header.total, kEager);
  const bool withheld = !lent && lent_ + bytes + kHeaderCharge > kUnreadLimit;
  item.bytes = withheld ? 0 : static_cast<std::size_t>(bytes);
  item.header = message->header;
  if (!lent) item.header.code = withheld ? kDeferred : 0;
  item.header.payload = static_cast<std::uint32_t>(item.bytes);
  item.data = message->data;
  item.message = message;
  message->cursor = item.bytes;
  item.last = lent || (!withheld && message->cursor == message->header.total);
  lent_ += charge_of(item.header);
  return item;
}

Link::Item Link::next_chunk(const std::shared_ptr<Outgoing>& message) {
  Item item;
  const std::uint64_t left = message->header.total - message->cursor;
  item.bytes = static_cast<std::size_t>(std::min<std::uint64_t>(left, kMoreLimit));
  item.header = message->header;
  item.header.type = FrameType::kMore;
  item.header.payload = static_cast<std::uint32_t>(item.bytes);
  item.data = message->data + message->cursor;
  item.message = message;
  message->cursor += item.bytes;
  item.last = message->cursor == message->header.total;
  return item;
}

bool Link::flush_locked() {
  bool all = flush_queues();
  if (!all) {
    // The peer may have made room, and signalled it, before backlog_ was set: try again.
    backlog_.store(true, std::memory_order_seq_cst);
    all = flush_queues();
  }
  backlog_.store(!all, std::memory_order_relaxed);
  return all;
}

bool Link::flush_queues() {
  while (!broken()) {
    if (queue_.empty()) {
      if (bulk_.empty()) return true;
      auto message = std::move(bulk_.front());
      bulk_.pop_front();
      queue_.push_back(next_chunk(message));
      if (!queue_.back().last) bulk_.push_back(std::move(message));
    }
    Push result = push(queue_.front());
    if (result == Push::kBlocked) return false;
    if (result == Push::kBroken) return true;  // the reader detects it, after reading what had arrived
    finish(queue_.front());
    queue_.pop_front();
  }
  return true;
}

bool Link::flush() {
  std::lock_guard lock(send_mutex_);
  bool all = flush_locked();
  want_write(!all);
  return all;
}

bool Link::idle() {
  std::lock_guard lock(send_mutex_);
  return broken() || (queue_.empty() && bulk_.empty() && awaiting_grant_.empty());
}

void Link::send_control(FrameHeader header, const void* payload, std::size_t bytes) {
  Item item;
  bytes = clipped(static_cast<const char*>(payload), bytes,
                  header.type == FrameType::kAgree ? kAgreeLimit : kTextLimit);
  header.payload = static_cast<std::uint32_t>(bytes);
  item.header = header;
  if (bytes > 0) {
    auto from = static_cast<const std::byte*>(payload);
    item.owned.assign(from, from + bytes);
  }
  item.data = item.owned.data();
  item.bytes = bytes;
  std::lock_guard lock(send_mutex_);
  if (broken()) return;
  queue_.push_back(std::move(item));
  want_write(!flush_locked());
}

void Link::send(const std::shared_ptr<Outgoing>& message) {
  std::lock_guard lock(send_mutex_);
  message->header.message = next_message_++;
  Item item = first_chunk(message);
  if (!item.last) awaiting_grant_.emplace(message->header.message, message);
  if (queue_.empty() && !broken() && push(item) == Push::kAll) {
    finish(item);
    if (!bulk_.empty()) want_write(!flush_locked());
    return;
  }
  if (item.last && item.bytes <= kBuffered) {  // copy the small remainder, so that the sender can continue
    item.owned.assign(item.data, item.data + item.bytes);
    item.data = item.owned.data();
    finish(item);
    item.message.reset();
  }
  queue_.push_back(std::move(item));
  want_write(!flush_locked());
}

void Link::granted(std::uint64_t id, bool declined) {
  std::lock_guard lock(send_mutex_);
  auto found = awaiting_grant_.find(id);
  if (found == awaiting_grant_.end()) return;  // it was withdrawn
  auto message = std::move(found->second);
  awaiting_grant_.erase(found);
  if (declined) {
    message->done.store(true, std::memory_order_release);
    sink_.on_sent();
    return;
  }
  bulk_.push_back(std::move(message));
  want_write(!flush_locked());
}

bool Link::ungranted(const Outgoing& message) {
  std::lock_guard lock(send_mutex_);
  return awaiting_grant_.contains(message.header.message);
}

bool Link::cancel(const std::shared_ptr<Outgoing>& message) {
  std::lock_guard lock(send_mutex_);
  if (message->done.load(std::memory_order_acquire)) return true;
  const bool waits = awaiting_grant_.erase(message->header.message) > 0;
  const bool whole = !waits && message->cursor == message->header.total;
  bulk_.erase(std::remove(bulk_.begin(), bulk_.end(), message), bulk_.end());
  for (Item& item : queue_) {
    if (item.message != message) continue;
    // The frame may be partly written: keep the stream intact, but release the user's memory.
    item.owned.assign(item.data, item.data + item.bytes);
    item.data = item.owned.data();
    item.message.reset();
  }
  message->done.store(true, std::memory_order_release);
  if (whole || broken()) return whole;
  Item item;
  item.header.type = FrameType::kWithdrawn;
  item.header.source = message->header.source;
  item.header.group = message->header.group;
  item.header.channel = message->header.channel;
  item.header.message = message->header.message;
  queue_.push_back(std::move(item));
  want_write(!flush_locked());
  return false;
}

bool Link::written(const Outgoing& message) {
  std::lock_guard lock(send_mutex_);
  return message.done.load(std::memory_order_acquire);
}

void Link::credited(std::uint64_t bytes) {
  std::lock_guard lock(send_mutex_);
  lent_ -= bytes;
}

std::uint64_t Link::lent() {
  std::lock_guard lock(send_mutex_);
  return lent_;
}

void Link::release(std::uint64_t bytes) {
  if (bytes == 0 || read_.fetch_add(bytes, std::memory_order_acq_rel) + bytes < kCreditBatch) return;
  FrameHeader credit;
  credit.type = FrameType::kCredit;
  credit.total = read_.exchange(0, std::memory_order_acq_rel);
  if (credit.total == 0) return;  // another thread returned it
  unread_.fetch_sub(credit.total, std::memory_order_acq_rel);
  send_control(credit);
}

void Link::ask_for_rest(const FrameHeader& header, std::shared_ptr<Incoming> incoming) {
  {
    std::lock_guard lock(route_mutex_);
    routes_[header.message] = {header, header.payload, std::move(incoming)};
  }
  answer(header.message, kWanted);
}

void Link::decline(const FrameHeader& header) {
  if (!given_up_.load(std::memory_order_acquire)) answer(header.message, kDeclined);
}

void Link::answer(std::uint64_t message, Answer answer) {
  FrameHeader grant;
  grant.type = FrameType::kGrant;
  grant.code = answer;
  grant.message = message;
  send_control(grant);
}

std::shared_ptr<Incoming> Link::unroute(std::uint64_t message) {
  std::lock_guard lock(route_mutex_);
  auto found = routes_.find(message);
  if (found == routes_.end()) return nullptr;
  auto incoming = std::move(found->second.incoming);
  routes_.erase(found);
  return incoming;
}

std::shared_ptr<Incoming> Link::routed(std::uint64_t message) {
  std::lock_guard lock(route_mutex_);
  auto found = routes_.find(message);
  return found == routes_.end() ? nullptr : found->second.incoming;
}

void Link::forget(std::uint64_t group) {
  std::lock_guard lock(route_mutex_);
  std::erase_if(routes_, [&](const auto& entry) {
    return entry.second.header.group == group && entry.second.incoming == nullptr;
  });
}

void Link::detach(const Incoming* incoming, bool forget) {
  {
    std::lock_guard lock(receive_mutex_);
    if (destination_.incoming.get() == incoming) {
      destination_.data = nullptr;
      if (forget) destination_.incoming = nullptr;
    }
    std::lock_guard routes(route_mutex_);
    for (auto& [message, route] : routes_)
      if (route.incoming.get() == incoming) route.incoming = nullptr;
  }
  if (missed_.load(std::memory_order_seq_cst)) receive();
}

// A thread that finds another thread reading goes to sleep.  So the reader checks again before it leaves: the
// data that woke the other thread may not have been there at the last check.
bool Link::receive() {
  bool any = false;
  do {
    std::unique_lock lock(receive_mutex_, std::try_to_lock);
    if (!lock.owns_lock()) {
      missed_.store(true, std::memory_order_seq_cst);
      std::atomic_thread_fence(std::memory_order_seq_cst);
      if (!lock.try_lock()) return any;
    }
    if (missed_.load(std::memory_order_relaxed)) missed_.exchange(false, std::memory_order_seq_cst);
    if (broken()) return any;
    for (std::size_t i = 0; (i < kReadBatch || holds_bytes()) && !broken() && receive_some(); ++i) any = true;
    lock.unlock();
    std::atomic_thread_fence(std::memory_order_seq_cst);
  } while (missed_.load(std::memory_order_relaxed));
  return any;
}

void Link::receive_all() {
  {
    std::lock_guard lock(receive_mutex_);
    while (!broken() && receive_some()) {
    }
  }
  receive_missed();
}

void Link::await_reader() {
  {
    std::lock_guard lock(receive_mutex_);
  }
  receive_missed();
}

// A thread that held the reader mutex must read for threads that were turned away meanwhile: they sleep.
void Link::receive_missed() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (missed_.load(std::memory_order_relaxed)) receive();
}

bool Link::failed(std::ptrdiff_t moved) {
  if (moved == kPeerClosed) fail(LinkEnd::kClosed, "connection closed");
  if (moved == kCorrupt) refuse("indices of a ring that are out of range");
  return moved < 0;
}

// Checks the received header and selects the destination of its payload.  False: the link has ended.
bool Link::accept_header() {
  LinkState state;
  state.next_message = arrived_ + 1;
  state.unread = unread_.load(std::memory_order_relaxed);
  state.packets = sink_.packets(*this);
  FrameHeader continues;
  if (header_.type == FrameType::kMore) {
    std::lock_guard lock(route_mutex_);
    if (auto found = routes_.find(header_.message); found != routes_.end()) {
      continues = found->second.header;
      state.continues = &continues;
      state.arrived = found->second.arrived;
    }
  } else if (header_.type == FrameType::kGrant || header_.type == FrameType::kCredit) {
    std::lock_guard lock(send_mutex_);
    state.sent = next_message_ - 1;
    state.lent = lent_;
  }
  if (const char* flaw = invalid_reason(header_, state)) {
    refuse(flaw);
    return false;
  }
  if (header_.type == FrameType::kMessage) {
    ++arrived_;
    unread_.fetch_add(charge_of(header_), std::memory_order_relaxed);
    charge_ = Charge(*this, charge_of(header_));
  }
  destination_ = sink_.on_header(*this, header_);
  return !broken();
}

// Delivers the complete frame.
void Link::accept_payload() {
  Destination destination = std::move(destination_);
  destination_ = {};
  if (header_.type == FrameType::kMore) {
    std::lock_guard lock(route_mutex_);
    Route& route = routes_[header_.message];
    route.arrived += header_.payload;
    if (route.arrived == route.header.total) routes_.erase(header_.message);
  }
  sink_.on_frame(*this, header_, destination);
  Charge read = std::move(charge_);
}

// Reads one frame, or the available part of it.  True if anything was read.
bool Link::receive_some() {
  bool any = false;
  while (header_filled_ < sizeof(FrameHeader)) {
    auto at = reinterpret_cast<std::byte*>(&header_) + header_filled_;
    std::ptrdiff_t got = read_some(at, sizeof(FrameHeader) - header_filled_);
    if (failed(got) || got == 0) return any;
    any = true;
    header_filled_ += static_cast<std::size_t>(got);
    payload_filled_ = 0;
    if (header_filled_ == sizeof(FrameHeader) && !accept_header()) return any;
  }
  while (payload_filled_ < header_.payload) {
    std::byte scratch[16 * 1024];
    std::size_t left = header_.payload - payload_filled_;
    bool keep = destination_.data != nullptr;
    std::ptrdiff_t got = read_some(keep ? destination_.data + payload_filled_ : scratch,
                                   keep ? left : std::min(left, sizeof scratch));
    if (failed(got) || got == 0) return any;
    any = true;
    payload_filled_ += static_cast<std::size_t>(got);
  }
  header_filled_ = 0;
  accept_payload();
  return true;
}

void Link::close() {
  std::scoped_lock lock(receive_mutex_, send_mutex_);
  broken_.store(true, std::memory_order_release);
  release_descriptor();
}

void Link::fail(LinkEnd end, const char* why) {
  if (broken_.exchange(true, std::memory_order_acq_rel)) return;
  unwatch();
  sink_.on_link_lost(*this, end, why);
}

}  // namespace shoal
