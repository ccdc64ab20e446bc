#include "transport/link.h"

#include <algorithm>

namespace shoal {
namespace {

constexpr std::size_t kReadBatch = 16;  // frames delivered before others get a turn

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

Link::Item Link::next_chunk(const std::shared_ptr<Outgoing>& message) {
  Item item;
  std::uint64_t left = message->header.total - message->cursor;
  bool first = message->cursor == 0;
  item.bytes = static_cast<std::size_t>(std::min<std::uint64_t>(left, first ? kEager : kMoreLimit));
  item.header = message->header;
  item.header.type = first ? FrameType::kMessage : FrameType::kMore;
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
    // The peer may have made room, and said so, before there was a backlog to see: look again.
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
    if (result == Push::kBroken) return true;  // the reader notices, after it has read what arrived before
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
  bytes = std::min(bytes, kTextLimit);
  header.payload = static_cast<std::uint32_t>(bytes);
  item.header = header;
  if (bytes > 0) {
    auto from = static_cast<const std::byte*>(payload);
    item.owned.assign(from, from + bytes);
  }
  item.data = item.owned.data();
  item.bytes = bytes;
  std::lock_guard lock(send_mutex_);
  queue_.push_back(std::move(item));
  want_write(!flush_locked());
}

void Link::send(const std::shared_ptr<Outgoing>& message) {
  std::lock_guard lock(send_mutex_);
  message->header.message = next_message_++;
  Item item = next_chunk(message);
  if (!item.last) awaiting_grant_.emplace(message->header.message, message);
  if (queue_.empty() && !broken() && push(item) == Push::kAll) {
    finish(item);
    if (!bulk_.empty()) want_write(!flush_locked());
    return;
  }
  if (item.last && item.bytes <= kBuffered) {  // copy the little that is left, so that the sender is free
    item.owned.assign(item.data, item.data + item.bytes);
    item.data = item.owned.data();
    finish(item);
    item.message.reset();
  }
  queue_.push_back(std::move(item));
  want_write(!flush_locked());
}

void Link::granted(std::uint64_t id) {
  std::lock_guard lock(send_mutex_);
  auto found = awaiting_grant_.find(id);
  if (found == awaiting_grant_.end()) return;
  bulk_.push_back(std::move(found->second));
  awaiting_grant_.erase(found);
  want_write(!flush_locked());
}

bool Link::ungranted(const Outgoing& message) {
  std::lock_guard lock(send_mutex_);
  return awaiting_grant_.contains(message.header.message);
}

void Link::cancel(const std::shared_ptr<Outgoing>& message) {
  std::lock_guard lock(send_mutex_);
  if (message->done.load(std::memory_order_acquire)) return;
  awaiting_grant_.erase(message->header.message);
  bulk_.erase(std::remove(bulk_.begin(), bulk_.end(), message), bulk_.end());
  for (Item& item : queue_) {
    if (item.message != message) continue;
    // The frame may be half on the wire: keep the stream whole, but let go of the user's memory.
    item.owned.assign(item.data, item.data + item.bytes);
    item.data = item.owned.data();
    item.message.reset();
  }
  message->done.store(true, std::memory_order_release);
}

void Link::route(std::uint64_t message, std::shared_ptr<Incoming> incoming) {
  std::lock_guard lock(route_mutex_);
  routes_[message] = std::move(incoming);
}

std::shared_ptr<Incoming> Link::routed(std::uint64_t message, bool last) {
  std::lock_guard lock(route_mutex_);
  auto found = routes_.find(message);
  if (found == routes_.end()) return nullptr;
  auto incoming = found->second;
  if (last) routes_.erase(found);
  return incoming;
}

void Link::detach(const Incoming* incoming) {
  {
    std::lock_guard lock(receive_mutex_);
    if (destination_.incoming.get() == incoming) destination_ = {};
    std::lock_guard routes(route_mutex_);
    for (auto it = routes_.begin(); it != routes_.end();)
      it = it->second.get() == incoming ? routes_.erase(it) : ++it;
  }
  if (missed_.load(std::memory_order_seq_cst)) receive();
}

// Who finds another thread reading goes to sleep, so that thread looks again before it leaves: it may have
// looked last before what the other came for was there.
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
  std::lock_guard lock(receive_mutex_);
  while (!broken() && receive_some()) {
  }
}

// Reads one frame, or as much of it as is there.  True if anything was read.
bool Link::receive_some() {
  bool any = false;
  while (header_filled_ < sizeof(FrameHeader)) {
    auto at = reinterpret_cast<std::byte*>(&header_) + header_filled_;
    std::ptrdiff_t got = read_some(at, sizeof(FrameHeader) - header_filled_);
    if (got < 0) fail("connection closed");
    if (got <= 0) return any;
    any = true;
    header_filled_ += static_cast<std::size_t>(got);
    if (header_filled_ == sizeof(FrameHeader)) {
      bool data = header_.type == FrameType::kMessage || header_.type == FrameType::kMore;
      if (header_.magic != kFrameMagic || header_.payload > kMoreLimit ||
          (data && header_.payload > header_.total)) {
        fail("the peer sent something that is not a frame");
        return any;
      }
      payload_filled_ = 0;
      destination_ = sink_.on_header(*this, header_);
    }
  }
  while (payload_filled_ < header_.payload) {
    std::byte scratch[16 * 1024];
    std::size_t left = header_.payload - payload_filled_;
    bool keep = destination_.data != nullptr;
    std::ptrdiff_t got = read_some(keep ? destination_.data + payload_filled_ : scratch,
                                   keep ? left : std::min(left, sizeof scratch));
    if (got < 0) fail("connection closed");
    if (got <= 0) return any;
    any = true;
    payload_filled_ += static_cast<std::size_t>(got);
  }
  header_filled_ = 0;
  Destination destination = std::move(destination_);
  destination_ = {};
  sink_.on_frame(*this, header_, destination);
  return true;
}

void Link::close() {
  std::scoped_lock lock(receive_mutex_, send_mutex_);
  broken_.store(true, std::memory_order_release);
  release();
}

void Link::fail(const char* why) {
  if (broken_.exchange(true, std::memory_order_acq_rel)) return;
  unwatch();
  sink_.on_link_lost(*this, why);
}

}  // namespace shoal
