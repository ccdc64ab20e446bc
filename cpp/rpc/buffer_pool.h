// Memory for the large parts that arrive through sockets.
//
// The kernel zeroes fresh pages and takes a fault for each, which costs about as much as receiving the data.
// So an unused buffer is kept for later parts for some seconds.  New buffers ask for huge pages: 64 MB then
// take 32 faults instead of 16,384.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "common/clock.h"
#include "rpc/budget.h"

namespace shoal {

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // Keeps buffers as far as the budget has room.  `first_kept` is called when a kept buffer makes `tidy` due
  // that was not due before; it must not block.
  BufferPool(std::shared_ptr<Budget> budget, std::function<void()> first_kept)
      : budget_(std::move(budget)), first_kept_(std::move(first_kept)) {}
  ~BufferPool();

  // A buffer of at least `bytes` with any contents; null if out of memory.
  std::shared_ptr<std::byte> take(std::uint64_t bytes);
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

  const std::shared_ptr<Budget> budget_;
  std::function<void()> first_kept_;
  std::atomic<bool> open_{true};
  std::atomic<std::int64_t> tidy_at_{kNever};
  std::mutex mutex_;
  Buffers idle_;  // in order of release
  std::uint64_t bytes_ = 0;
};

}  // namespace shoal
