// Memory for the large parts that come through sockets.
//
// The kernel zeroes fresh pages and takes a fault for each, which costs about as much as the bytes that come
// into them.  So a buffer that nobody uses any more is kept for the parts that come next, until nobody has
// wanted it for some seconds; and fresh ones ask for huge pages, of which 64 MB take 32 faults instead of
// 16,384.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "post/budget.h"

namespace shoal {

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // Buffers are kept as far as the budget has room for them.  `first_kept` is called when `tidy`
  // becomes due because a buffer is kept, and was not due before; it must not block.
  BufferPool(std::shared_ptr<Budget> budget, std::function<void()> first_kept)
      : budget_(std::move(budget)), first_kept_(std::move(first_kept)) {}
  ~BufferPool();

  // A buffer of at least so many bytes with any content; null if there is no memory.
  std::shared_ptr<std::byte> take(std::uint64_t bytes);
  // Gives the buffers back to the system that nobody has wanted for some seconds.
  void tidy(std::int64_t now);
  // When `tidy` is due (ns); the largest number if nothing is kept.
  std::int64_t tidy_at() const { return tidy_at_.load(std::memory_order_relaxed); }
  // Bytes that are kept.
  std::uint64_t kept();
  // Gives all buffers that are kept back to the system.
  void clear();
  // Gives all buffers back, now and from now on, and calls `first_kept` no more.
  void close();
  // Keeps nothing from now on; for a forked child, where the lock may be held for ever.
  void disown() { open_ = false; }

 private:
  struct Buffer {
    std::byte* base = nullptr;  // of the mapping
    std::uint64_t length = 0;   // of the mapping
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
    std::int64_t since = 0;  // when it was let go of
  };
  using Buffers = std::vector<Buffer>;
  static Buffer map(std::uint64_t bytes);
  static void unmap(const Buffer& buffer);
  static void unmap(const Buffers& buffers);
  std::shared_ptr<std::byte> hand_out(Buffer buffer);
  void give_back(Buffer buffer);
  Buffers beyond(std::uint64_t limit);
  void remove(Buffers::iterator begin, Buffers::iterator end);

  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  const std::shared_ptr<Budget> budget_;
  std::function<void()> first_kept_;
  std::atomic<bool> open_{true};
  std::atomic<std::int64_t> tidy_at_{kNever};
  std::mutex mutex_;
  Buffers idle_;  // in the order in which they were let go of
  std::uint64_t bytes_ = 0;
};

}  // namespace shoal
