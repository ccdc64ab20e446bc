// Memory for data that arrives through sockets, and for partial results between hosts.
//
// The kernel zeroes fresh pages and takes a fault for each, which costs about as much as receiving the data,
// and malloc() may return freed memory to it at any time.  So an unused buffer is kept for some seconds.  New
// buffers ask for huge pages: 64 MB then take 32 faults instead of 16,384.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "common/clock.h"

namespace shoal {

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // Keeps at most limit() bytes.  `first_kept`, if given, is called when a kept buffer makes `tidy` due that
  // was not due before; it must not block.
  BufferPool(std::function<std::uint64_t()> limit, std::function<void()> first_kept = {})
      : limit_(std::move(limit)), first_kept_(std::move(first_kept)) {}
  ~BufferPool();

  // A buffer of at least `bytes` with any contents; null if out of memory.
  std::shared_ptr<std::byte> take(std::uint64_t bytes);
  // The same; small buffers are not kept.  Throws std::bad_alloc.
  std::shared_ptr<std::byte> scratch(std::uint64_t bytes);
  // Returns buffers that were unused for some seconds to the system.
  void tidy(std::int64_t now);
  // When `tidy` is due (ns); the largest number if nothing is kept.
  std::int64_t tidy_at() const { return tidy_at_.load(std::memory_order_relaxed); }
  // Number of bytes kept.
  std::uint64_t kept();
  // Returns all kept buffers to the system.
  void clear();
  // Returns all buffers, now and later, and no longer calls `first_kept`.
  void close();
  // Keeps no more buffers; for a forked child, where the lock may be held forever.
  void disown() { open_ = false; }

 private:
  struct Buffer {
    std::byte* base = nullptr;  // of the mapping
    std::uint64_t length = 0;   // of the mapping
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
    std::int64_t since = 0;  // when it was released
  };
  using Buffers = std::vector<Buffer>;
  static Buffer map(std::uint64_t bytes);
  static void unmap(const Buffer& buffer);
  static void unmap(const Buffers& buffers);
  std::shared_ptr<std::byte> hand_out(Buffer buffer);
  void give_back(Buffer buffer);
  Buffers beyond(std::uint64_t limit);
  void remove(Buffers::iterator begin, Buffers::iterator end);

  const std::function<std::uint64_t()> limit_;
  std::function<void()> first_kept_;
  std::atomic<bool> open_{true};
  std::atomic<std::int64_t> tidy_at_{kNever};
  std::mutex mutex_;
  Buffers idle_;  // in order of release
  std::uint64_t bytes_ = 0;
};

}  // namespace shoal
