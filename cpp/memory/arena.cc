#include "memory/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace shoal {
namespace {

constexpr std::size_t kPage = 4096;
// Consecutive blocks whose distance is a power of two collide in the caches; one page more avoids it.
constexpr std::size_t kColourFrom = 16 * kPage;

std::size_t rounded(std::size_t bytes) {
  std::size_t whole = (bytes + kPage - 1) / kPage * kPage;
  if (whole == 0) whole = kPage;
  return whole >= kColourFrom ? whole + kPage : whole;
}

std::string reason(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

}  // namespace

Mapping::Mapping(int fd, std::size_t length) : length_(length) {
  void* at = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (at == MAP_FAILED) throw OutOfMemory(reason("cannot map shared memory"));
  madvise(at, length, MADV_DONTFORK);
  base_ = static_cast<std::byte*>(at);
}

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(base_, length_);
}

Arena::Arena(std::size_t capacity, std::size_t limit) : limit_(limit) {
  fd_ = memfd_create("shoal", MFD_CLOEXEC);
  if (fd_ < 0) throw OutOfMemory(reason("cannot create shared memory"));
  if (ftruncate(fd_, static_cast<off_t>(capacity)) != 0) {
    close(fd_);
    throw OutOfMemory(reason("cannot reserve shared memory"));
  }
  try {
    mapping_ = std::make_unique<Mapping>(fd_, capacity);
  } catch (...) {
    close(fd_);
    throw;
  }
  free_[0] = capacity;
}

Arena::~Arena() {
  if (fd_ >= 0) close(fd_);
}

std::size_t Arena::in_use() const {
  std::lock_guard lock(mutex_);
  return in_use_;
}

std::uint64_t Arena::allocate(std::size_t bytes, bool commit) {
  std::size_t size = rounded(bytes);
  std::lock_guard lock(mutex_);
  if (commit && in_use_ + size > limit_)
    throw OutOfMemory("the limit of " + std::to_string(limit_ >> 20) +
                      " MiB of shared memory is reached: " + std::to_string(in_use_ >> 20) + " MiB in use, " +
                      std::to_string(bytes) + " bytes asked for");
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < size) continue;
    std::uint64_t offset = it->first;
    if (commit) {
      int rc;
      do rc = fallocate(fd_, 0, static_cast<off_t>(offset), static_cast<off_t>(size));
      while (rc != 0 && errno == EINTR);
      if (rc != 0)
        throw OutOfMemory(reason("cannot allocate shared memory") + " (" + std::to_string(bytes) + " bytes)");
    }
    std::size_t rest = it->second - size;
    free_.erase(it);
    if (rest > 0) free_[offset + size] = rest;
    taken_[offset] = size;
    if (commit) in_use_ += size;
    return offset;
  }
  throw OutOfMemory("the reserved " + std::to_string(capacity() >> 20) +
                    " MiB of shared memory hold no free range of " + std::to_string(bytes) + " bytes");
}

void Arena::release(std::uint64_t offset) {
  if (fd_ < 0) return;  // in a forked child, where the lock may never be released
  std::lock_guard lock(mutex_);
  auto found = taken_.find(offset);
  if (found == taken_.end() || abandoned_.contains(offset)) return;
  std::size_t size = found->second;
  taken_.erase(found);
  in_use_ -= size < in_use_ ? size : in_use_;
  auto [it, inserted] = free_.emplace(offset, size);
  (void)inserted;
  if (auto next = std::next(it); next != free_.end() && it->first + it->second == next->first) {
    it->second += next->second;
    free_.erase(next);
  }
  if (it != free_.begin()) {
    auto before = std::prev(it);
    if (before->first + before->second == it->first) {
      before->second += it->second;
      free_.erase(it);
    }
  }
}

void Arena::abandon(const void* address) {
  std::lock_guard lock(mutex_);
  auto after = taken_.upper_bound(offset_of(address));
  if (after != taken_.begin()) abandoned_.insert(std::prev(after)->first);
}

void Arena::disown() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
  mapping_->disown();
}

}  // namespace shoal
