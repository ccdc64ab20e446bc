// A link within one host: a single-producer byte ring in each side's arena.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>

#include "net/link.h"
#include "shm/doorbell.h"

// A peer may write a reduction's result into memory that this rank has sent.  The accesses are ordered
// through the peer's mapping of the ring, which the thread sanitizer cannot follow, so it ignores reads for
// sending.
#if defined(__SANITIZE_THREAD__)
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
#define SHOAL_UNSEEN(reads)                     \
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__); \
  reads;                                        \
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__)
#else
#define SHOAL_UNSEEN(reads) reads
#endif

namespace shoal {

struct Ring {
  alignas(64) std::atomic<std::uint64_t> head{0};  // total bytes written, by the owner
  alignas(64) std::atomic<std::uint64_t> tail{0};  // total bytes read, by the peer
  std::atomic<std::uint32_t> full{0};              // the writer waits for room
  alignas(64) std::byte data[1];

  static std::size_t footprint(std::size_t capacity) { return offsetof(Ring, data) + capacity; }
};

class RingLink final : public Link {
 public:
  RingLink(int peer, FrameSink& sink, Ring* out, Ring* in, std::size_t capacity, Doorbell* peer_bell)
      : Link(peer, sink), out_(out), in_(in), capacity_(capacity), bell_(peer_bell) {}

  // Cheap enough for a spinning thread.
  bool readable() const {
    return in_->head.load(std::memory_order_acquire) != tail_ || corrupt_.load(std::memory_order_relaxed);
  }

 protected:
  std::ptrdiff_t write_some(const iovec* parts, int count) override {
    std::uint64_t head = head_;
    std::uint64_t used = head - out_->tail.load(std::memory_order_acquire);
    if (used == capacity_) {
      out_->full.store(1, std::memory_order_seq_cst);
      used = head - out_->tail.load(std::memory_order_seq_cst);
    }
    if (used > capacity_) {  // the reader ends the link: a sender may hold locks of other objects
      corrupt_.store(true, std::memory_order_relaxed);
      return kCorrupt;
    }
    if (used == capacity_) return 0;
    std::uint64_t room = std::min(capacity_ - used, capacity_ / kSteps);
    std::ptrdiff_t moved = 0;
    for (int i = 0; i < count && room > 0; ++i) {
      std::size_t bytes = parts[i].iov_len < room ? parts[i].iov_len : static_cast<std::size_t>(room);
      transfer(
          head, bytes,
          [&](std::byte* ring, std::size_t offset, std::size_t n) {
            SHOAL_UNSEEN(std::memcpy(ring, static_cast<const std::byte*>(parts[i].iov_base) + offset, n));
          },
          out_);
      head += bytes;
      room -= bytes;
      moved += static_cast<std::ptrdiff_t>(bytes);
    }
    head_ = head;
    out_->head.store(head, std::memory_order_release);
    bell_->ring_link();
    return moved;
  }

  std::ptrdiff_t read_some(std::byte* data, std::size_t bytes) override {
    const std::uint64_t tail = tail_;
    const std::uint64_t there = in_->head.load(std::memory_order_acquire) - tail;
    if (there > capacity_ || corrupt_.load(std::memory_order_relaxed)) return kCorrupt;
    if (there == 0) return 0;
    bytes = static_cast<std::size_t>(std::min<std::uint64_t>({bytes, there, capacity_ / kSteps}));
    transfer(
        tail, bytes,
        [&](std::byte* ring, std::size_t offset, std::size_t n) { std::memcpy(data + offset, ring, n); },
        in_);
    tail_ = tail + bytes;
    in_->tail.store(tail_, std::memory_order_seq_cst);
    if (in_->full.load(std::memory_order_seq_cst) != 0 && in_->full.exchange(0) != 0) bell_->ring_link();
    return static_cast<std::ptrdiff_t>(bytes);
  }

 private:
  template <class Copy>
  void transfer(std::uint64_t position, std::size_t bytes, Copy copy, Ring* ring) {
    std::size_t at = static_cast<std::size_t>(position % capacity_);
    std::size_t first = bytes < capacity_ - at ? bytes : capacity_ - at;
    copy(ring->data + at, 0, first);
    if (bytes > first) copy(ring->data, first, bytes - first);
  }

  // Each side passes on a part of the ring's memory at a time, so that both copy at the same time.
  static constexpr std::size_t kSteps = 4;

  Ring* out_;
  Ring* in_;
  std::size_t capacity_;
  Doorbell* bell_;
  // Private copies of the indices, to check the rings' indices, which the peer can write.
  std::uint64_t head_ = 0;
  std::atomic<std::uint64_t> tail_{0};
  std::atomic<bool> corrupt_{false};
};

}  // namespace shoal
