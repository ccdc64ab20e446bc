#include "shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>

#include "common/clock.h"

namespace shoal {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kTrimBytes = 64 << 20;  // maximum number of bytes returned to the system at a time
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW, kSeals = kSizeSeals | F_SEAL_SEAL;
// Consecutive blocks at a power-of-two distance conflict in the caches; one more page avoids that.
constexpr std::size_t kColourFrom = 16 * kPage;

std::size_t rounded(std::size_t bytes) {
  std::size_t whole = (bytes + kPage - 1) / kPage * kPage;
  if (whole == 0) whole = kPage;
  return whole >= kColourFrom ? whole + kPage : whole;
}

std::string reason(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

}  // namespace

Mapping::Mapping(int fd, std::size_t length, Forks forks) : length_(length) {
  struct stat info{};
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals || fstat(fd, &info) != 0 ||
      static_cast<std::uint64_t>(info.st_size) != length)
    throw BadMemory("the shared memory is not a sealed memfd of " + std::to_string(length) + " bytes");
  void* at = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (at == MAP_FAILED) throw OutOfMemory(reason("cannot map shared memory"));
  if (forks == kLeftOut) madvise(at, length, MADV_DONTFORK);
  base_ = static_cast<std::byte*>(at);
}

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(base_, length_);
}

Arena::Arena(std::size_t capacity, std::size_t limit) : limit_(limit) {
  fd_ = memfd_create("shoal", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd_ < 0) throw OutOfMemory(reason("cannot create shared memory"));
  if (ftruncate(fd_, static_cast<off_t>(capacity)) != 0 || fcntl(fd_, F_ADD_SEALS, kSeals) != 0) {
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

std::size_t Arena::idle_bytes() const {
  std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (auto& [offset, range] : warm_) sum += range.bytes;
  return sum;
}

std::uint64_t Arena::allocate(std::size_t bytes, bool commit) {
  const std::size_t size = rounded(bytes);
  bool whole = false;
  const std::uint64_t offset = take(bytes, commit, whole);
  if (!commit || whole) return offset;
  auto populate = [&] {
    int rc;
    do rc = fallocate(fd_, 0, static_cast<off_t>(offset), static_cast<off_t>(size));
    while (rc != 0 && errno == EINTR);
    return rc == 0;
  };
  if (populate()) return offset;
  while (trim(std::numeric_limits<std::int64_t>::max())) {
  }
  if (populate()) return offset;
  const std::string why = reason("cannot allocate shared memory");
  put_back(offset, false);
  throw OutOfMemory(why + " (" + std::to_string(bytes) + " bytes)");
}

// Marks a range as taken; unless it is `whole`, some of its pages may be missing.
std::uint64_t Arena::take(std::size_t bytes, bool commit, bool& whole) {
  const std::size_t size = rounded(bytes);
  std::lock_guard lock(mutex_);
  if (commit && in_use_ + size > limit_)
    throw OutOfMemory("the limit of " + std::to_string(limit_ >> 20) +
                      " MiB of shared memory is reached: " + std::to_string(in_use_ >> 20) + " MiB in use, " +
                      std::to_string(bytes) + " bytes asked for");
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < size) continue;
    std::uint64_t offset = it->first;
    std::size_t rest = it->second - size;
    free_.erase(it);
    if (rest > 0) free_[offset + size] = rest;
    taken_[offset] = {.bytes = size, .committed = commit};
    if (commit) in_use_ += size;
    whole = cool(offset, size);
    return offset;
  }
  throw OutOfMemory("the reserved " + std::to_string(capacity() >> 20) +
                    " MiB of shared memory hold no free range of " + std::to_string(bytes) + " bytes");
}

void Arena::release(std::uint64_t offset) { put_back(offset, true); }

// All pages of a committed range are present, unless populating it failed.
void Arena::put_back(std::uint64_t offset, bool populated) {
  if (fd_ < 0) return;  // in a forked child, where the lock may never be released
  std::lock_guard lock(mutex_);
  auto found = taken_.find(offset);
  if (found == taken_.end()) return;
  if (found->second.holds > 0)
    found->second.released = true;
  else
    return_range(found, populated);
}

std::optional<std::uint64_t> Arena::hold(const void* address) {
  std::lock_guard lock(mutex_);
  const std::uint64_t offset = offset_of(address);
  auto after = taken_.upper_bound(offset);
  if (after == taken_.begin()) return std::nullopt;
  auto& [first, range] = *std::prev(after);
  if (offset >= first + range.bytes || range.released) return std::nullopt;
  ++range.holds;
  return first;
}

void Arena::unhold(std::uint64_t offset) {
  if (fd_ < 0) return;
  std::lock_guard lock(mutex_);
  auto found = taken_.find(offset);
  if (found == taken_.end() || found->second.holds == 0) return;
  if (--found->second.holds == 0 && found->second.released) return_range(found, true);
}

// Requires the lock.
void Arena::return_range(std::map<std::uint64_t, Taken>::iterator range, bool populated) {
  const auto [offset, taken] = *range;
  taken_.erase(range);
  if (taken.committed) in_use_ -= taken.bytes;
  give_back(offset, taken.bytes);
  warm_[offset] = {taken.bytes, now_ns(), taken.committed && populated};
}

// Requires the lock: adds a range to the free ranges.
void Arena::give_back(std::uint64_t offset, std::size_t bytes) {
  auto it = free_.emplace(offset, bytes).first;
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

// Requires the lock: removes the range from warm_; returns whether all its pages are present.
bool Arena::cool(std::uint64_t offset, std::size_t bytes) {
  const std::uint64_t end = offset + bytes;
  std::size_t there = 0;
  auto it = warm_.lower_bound(offset);
  if (it != warm_.begin() && std::prev(it)->first + std::prev(it)->second.bytes > offset) --it;
  while (it != warm_.end() && it->first < end) {
    const std::uint64_t first = it->first, last = first + it->second.bytes;
    const Warm idle_bytes = it->second;
    if (idle_bytes.whole) there += std::min(last, end) - std::max(first, offset);
    it = warm_.erase(it);
    if (first < offset) warm_[first] = {offset - first, idle_bytes.since, idle_bytes.whole};
    if (last > end) warm_[end] = {last - end, idle_bytes.since, idle_bytes.whole};
  }
  return there == bytes;
}

// The range is not in the free list while its pages are released, so nobody can take it.
bool Arena::trim(std::int64_t until) {
  std::uint64_t offset = 0;
  std::size_t bytes = 0;
  {
    std::lock_guard lock(mutex_);
    auto due =
        std::find_if(warm_.begin(), warm_.end(), [&](auto& entry) { return entry.second.since <= until; });
    if (due == warm_.end()) return false;
    offset = due->first;
    bytes = std::min(due->second.bytes, kTrimBytes);
    cool(offset, bytes);
    auto it = std::prev(free_.upper_bound(offset));
    const std::uint64_t first = it->first, last = first + it->second;
    free_.erase(it);
    if (first < offset) free_[first] = offset - first;
    if (last > offset + bytes) free_[offset + bytes] = last - offset - bytes;
  }
  // The size does not change, so a peer that still reads there gets zeros.
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(bytes));
  std::lock_guard lock(mutex_);
  give_back(offset, bytes);
  return true;
}

void Arena::disown() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
  mapping_->disown();
}

}  // namespace shoal
