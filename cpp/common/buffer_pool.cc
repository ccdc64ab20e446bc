#include "common/buffer_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "common/clock.h"

namespace shoal {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kHugePage = 2 << 20;  // this alignment is useless if huge pages are larger

#ifdef SHOAL_CHECKED_MEMORY  // an address sanitizer checks the bounds of allocated memory only
constexpr std::uint64_t kKeptFrom = ~std::uint64_t{0};
#else
constexpr std::uint64_t kKeptFrom = 64 << 10;
#endif

// A buffer may be at most a quarter larger than requested.
bool fits(std::uint64_t buffer, std::uint64_t wanted) {
  return wanted <= buffer && buffer - wanted <= wanted / 4;
}

}  // namespace

BufferPool::~BufferPool() { unmap(idle_); }

BufferPool::Buffer BufferPool::map(std::uint64_t bytes) {
  Buffer buffer;
  buffer.bytes = (bytes + kPage - 1) / kPage * kPage;
  const bool huge = bytes >= 2 * kHugePage;
  buffer.length = buffer.bytes + (huge ? kHugePage : 0);
  void* const base = mmap(nullptr, buffer.length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return {};
  buffer.base = buffer.data = static_cast<std::byte*>(base);
  if (huge) {
    const auto over = reinterpret_cast<std::uintptr_t>(base) % kHugePage;
    buffer.data += over == 0 ? 0 : kHugePage - over;
    madvise(buffer.data, buffer.bytes, MADV_HUGEPAGE);  // advice only
  }
  return buffer;
}

void BufferPool::unmap(const Buffer& buffer) { munmap(buffer.base, buffer.length); }

void BufferPool::unmap(const Buffers& buffers) {
  for (const Buffer& buffer : buffers) unmap(buffer);
}

std::shared_ptr<std::byte> BufferPool::hand_out(Buffer buffer) {
  return {buffer.data, [self = shared_from_this(), buffer](std::byte*) { self->give_back(buffer); }};
}

std::shared_ptr<std::byte> BufferPool::take(std::uint64_t bytes) {
  Buffer buffer;
  Buffers others;
  {
    std::lock_guard lock(mutex_);
    // The most recently used one, whose contents may be in caches.
    const auto found =
        std::find_if(idle_.rbegin(), idle_.rend(), [&](auto& each) { return fits(each.bytes, bytes); });
    if (found != idle_.rend()) {
      buffer = *found;
      remove(std::prev(found.base()), found.base());
    } else {
      others = beyond(limit_());
    }
  }
  unmap(others);
  if (buffer.base == nullptr) buffer = map(bytes);
  return buffer.base == nullptr ? nullptr : hand_out(buffer);
}

std::shared_ptr<std::byte> BufferPool::scratch(std::uint64_t bytes) {
  if (bytes < kKeptFrom) return {new std::byte[bytes], std::default_delete<std::byte[]>()};
  std::shared_ptr<std::byte> buffer = take(bytes);
  if (buffer == nullptr) throw std::bad_alloc();
  return buffer;
}

void BufferPool::give_back(Buffer buffer) {
  if (!open_) return unmap(buffer);
  Buffers others;
  {
    std::lock_guard lock(mutex_);
    buffer.since = now_ns();
    idle_.push_back(buffer);
    bytes_ += buffer.bytes;
    others = beyond(open_ ? limit_() : 0);
    if (!idle_.empty() && tidy_at_ == kNever) {
      tidy_at_ = buffer.since + kIdleMemoryTime;
      if (first_kept_) first_kept_();
    }
  }
  unmap(others);
}

// Requires the lock: removes the oldest buffers until the others have at most `limit` bytes.
BufferPool::Buffers BufferPool::beyond(std::uint64_t limit) {
  auto end = idle_.begin();
  std::uint64_t left = bytes_;
  while (left > limit) left -= (end++)->bytes;
  Buffers others(idle_.begin(), end);
  remove(idle_.begin(), end);
  return others;
}

// Requires the lock.
void BufferPool::remove(Buffers::iterator begin, Buffers::iterator end) {
  for (auto at = begin; at != end; ++at) bytes_ -= at->bytes;
  idle_.erase(begin, end);
}

void BufferPool::tidy(std::int64_t now) {
  Buffers old;
  {
    std::lock_guard lock(mutex_);
    const auto end = std::find_if(idle_.begin(), idle_.end(),
                                  [&](auto& each) { return each.since + kIdleMemoryTime > now; });
    old.assign(idle_.begin(), end);
    remove(idle_.begin(), end);
    tidy_at_ = idle_.empty() ? kNever : idle_.front().since + kIdleMemoryTime;
  }
  unmap(old);
}

std::uint64_t BufferPool::kept() {
  std::lock_guard lock(mutex_);
  return bytes_;
}

void BufferPool::clear() {
  Buffers all;
  {
    std::lock_guard lock(mutex_);
    all = beyond(0);
  }
  unmap(all);
}

void BufferPool::close() {
  open_ = false;
  clear();  // a concurrent give_back() either comes before this, or finds the pool closed
  std::lock_guard lock(mutex_);
  first_kept_ = nullptr;
}

}  // namespace shoal
