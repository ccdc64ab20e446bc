#include "rpc/shared_buffers.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "common/clock.h"
#include "kernels/reduce.h"

namespace shoal {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kHeader = kPage;        // bytes before a block's data, which can be mapped by itself
constexpr std::uint64_t kWantedBack = 8;        // place in the header of the sender's request for a copy
constexpr std::uint64_t kTaken = 1ULL << 63;    // in a block's word
constexpr std::uint64_t kLargest = 1ULL << 40;  // maximum bytes of a memory: several fit in an address space
constexpr std::size_t kChecksPerLease = 16;     // blocks that one loan checks, however many are lent
constexpr std::int64_t kLongestPause = 64 * kSecond;
constexpr std::uint64_t kStream = 16 << 20;  // larger copies bypass the caches

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

std::uint64_t whole_pages(std::uint64_t bytes) { return std::min(bytes, kLargest) / kPage * kPage; }

std::uint64_t page_end(std::uint64_t at) { return (at + kPage - 1) / kPage * kPage; }

// The kernel can map the data of a block by itself only if its pages are not larger than the header.
bool pages_are_small() {
  static const bool small = sysconf(_SC_PAGESIZE) == static_cast<long>(kPage);
  return small;
}

std::atomic<unsigned> process{0};  // incremented in a forked child

}  // namespace

// -- sending ----------------------------------------------------------------------------------------------

SharedBufferPool::SharedBufferPool(std::uint64_t limit, std::function<void()> sooner)
    : arena_(whole_pages(limit), whole_pages(limit)),
      limit_(limit),
      process_(process.load()),
      sooner_(std::move(sooner)),
      tidy_at_(kNever) {}

bool SharedBufferPool::allocate(std::uint64_t bytes, std::uint64_t& place) {
  {
    std::lock_guard lock(mutex_);
    look(kChecksPerLease);
  }
  try {
    place = arena_.allocate(kHeader + page_end(bytes));
    return true;
  } catch (const OutOfMemory&) {
    return false;
  }
}

std::shared_ptr<std::byte> SharedBufferPool::reserve(std::uint64_t bytes) {
  std::uint64_t place;
  if (bytes > kLargest || !allocate(bytes, place)) return nullptr;
  {
    std::lock_guard lock(mutex_);
    word(place).store(kTaken, std::memory_order_relaxed);
    table_.emplace(place, Entry{0, 0, bytes});
  }
  return {arena_.mapping().base() + place + kHeader,
          [self = shared_from_this(), place](std::byte*) { self->cancel_reservation(place); }};
}

void SharedBufferPool::cancel_reservation(std::uint64_t place) {
  if (process_ != process.load(std::memory_order_relaxed)) {
    // A forked child has not the memory, and the lock may be held forever: keep all as it is.
    (void)new std::shared_ptr<SharedBufferPool>(shared_from_this());
    return;
  }
  std::lock_guard lock(mutex_);
  auto found = table_.find(place);
  found->second.reserved = 0;
  if (found->second.number != 0) return;
  free(found);
  tidy_soon();
}

// Requires the lock.
void SharedBufferPool::tidy_soon() {
  pause_ = kSecond;
  const std::int64_t at = now_ns() + pause_;
  if (at >= tidy_at_) return;
  tidy_at_ = at;
  if (sooner_) sooner_();
}

std::unique_ptr<SharedBufferPool::Lease> SharedBufferPool::lend(int peer, const std::byte* data,
                                                                std::uint64_t bytes) {
  std::uint64_t place;
  std::unique_lock lock(mutex_, std::defer_lock);
  Table::iterator entry = table_.end();
  if (arena_.contains(data, bytes) && arena_.offset_of(data) >= kHeader) {
    place = arena_.offset_of(data) - kHeader;
    lock.lock();
    entry = table_.find(place);
    const bool whole = entry != table_.end() && entry->second.number == 0 && entry->second.reserved >= bytes;
    if (!whole) entry = table_.end();  // somebody has it already, or this is a part of it
  }
  if (entry == table_.end()) {
    if (lock.owns_lock()) lock.unlock();
    if (!allocate(bytes, place)) return nullptr;
    kernels::copy(arena_.mapping().base() + place + kHeader, data, bytes, bytes >= kStream);
    lock.lock();
    entry = table_.emplace(place, Entry{}).first;
  }
  const std::uint64_t number = ++loans_;
  entry->second.number = number;
  entry->second.peer = peer;
  word(place + kWantedBack).store(arena_.in_use() > limit_ / 2, std::memory_order_relaxed);
  word(place).store(number, std::memory_order_release);
  tidy_soon();
  return std::make_unique<Lease>(shared_from_this(), place, number);
}

// Takes the block back; false if the peer has taken it.
bool SharedBufferPool::untaken(const Table::value_type& entry) {
  std::uint64_t number = entry.second.number;
  return word(entry.first).compare_exchange_strong(number, 0, std::memory_order_acq_rel);
}

SharedBufferPool::Table::iterator SharedBufferPool::free(Table::iterator at) {
  if (at->second.reserved > 0) {
    at->second.number = 0;
    at->second.peer = 0;
    word(at->first).store(kTaken, std::memory_order_relaxed);
    return std::next(at);
  }
  arena_.release(at->first);
  return table_.erase(at);
}

void SharedBufferPool::recall(std::uint64_t place, std::uint64_t number) {
  std::lock_guard lock(mutex_);
  auto found = table_.find(place);
  if (found != table_.end() && found->second.number == number && untaken(*found)) free(found);
}

void SharedBufferPool::lost(int peer) {
  std::lock_guard lock(mutex_);
  for (auto at = table_.begin(); at != table_.end();)
    at = at->second.peer == peer && untaken(*at) ? free(at) : std::next(at);
}

void SharedBufferPool::ended(int peer) {
  std::lock_guard lock(mutex_);
  for (auto at = table_.begin(); at != table_.end();) at = at->second.peer == peer ? free(at) : std::next(at);
}

bool SharedBufferPool::owes(int peer) {
  std::lock_guard lock(mutex_);
  return std::any_of(table_.begin(), table_.end(), [&](auto& entry) { return entry.second.peer == peer; });
}

// Requires the lock: frees returned blocks among the next `most` blocks, in turn.
void SharedBufferPool::look(std::size_t most) {
  auto at = table_.upper_bound(looked_at_);
  for (std::size_t left = std::min(most, table_.size()); left > 0; --left) {
    if (at == table_.end()) at = table_.begin();
    looked_at_ = at->first;
    at = word(at->first).load(std::memory_order_acquire) == 0 ? free(at) : std::next(at);
  }
}

std::uint64_t SharedBufferPool::lent() {
  std::lock_guard lock(mutex_);
  look(table_.size());
  return arena_.in_use();
}

void SharedBufferPool::forget() {
  std::lock_guard lock(mutex_);
  sooner_ = nullptr;
}

void SharedBufferPool::tidy(std::int64_t now) {
  std::unique_lock lock(mutex_);
  look(table_.size());
  lock.unlock();
  const bool more = arena_.trim(now - kIdleMemoryTime);  // some at a time, because packets wait meanwhile
  lock.lock();
  const bool has_idle = arena_.idle_bytes() > 0;
  pause_ = more ? 0 : has_idle ? kSecond : std::min(2 * std::max(pause_, kSecond), kLongestPause);
  tidy_at_ = has_idle || !table_.empty() ? now + pause_ : kNever;
}

// -- borrowing --------------------------------------------------------------------------------------------

// All memories of peers; before a fork, what this process holds of them becomes private.
struct Forks {
  std::mutex mutex;
  std::set<PeerBuffer*> all;

  // The handlers of endpoints, which hold their locks during a fork, must be registered after these.
  static Forks& of_process() {
    static auto* const forks = [] {
      pthread_atfork([] { of_process().before(); }, [] { of_process().after(); },
                     [] { of_process().in_child(); });
      return new Forks;
    }();
    return *forks;
  }

  // The locks are held during the fork, so that no part is taken meanwhile.
  void before() {
    mutex.lock();
    for (PeerBuffer* each : all) {
      each->mutex_.lock();
      each->separate();
    }
  }
  void after() {
    for (PeerBuffer* each : all) each->mutex_.unlock();
    mutex.unlock();
  }
  void in_child() {
    process.fetch_add(1);
    for (PeerBuffer* each : all) close(std::exchange(each->fd_, -1));
    after();
  }
};

void watch_forks() { Forks::of_process(); }

PeerBuffer::PeerBuffer(int fd, std::size_t length)
    : memory_(fd, length, Mapping::kInherited), fd_(fcntl(fd, F_DUPFD_CLOEXEC, 0)), process_(process.load()) {
  if (fd_ < 0) throw OutOfMemory("no descriptor for the memory of a peer");
  Forks& forks = Forks::of_process();
  std::lock_guard lock(forks.mutex);
  forks.all.insert(this);
}

PeerBuffer::~PeerBuffer() {
  Forks& forks = Forks::of_process();
  {
    std::lock_guard lock(forks.mutex);
    forks.all.erase(this);
  }
  if (fd_ >= 0) close(fd_);
}

PeerBuffer::Taken PeerBuffer::take(std::uint64_t place, std::uint64_t number, std::uint64_t bytes,
                                   const char*& flaw) {
  flaw = claim(place, number, bytes);
  if (flaw != nullptr) return {};
  std::shared_ptr<std::byte> data{memory_.base() + place + kHeader,
                                  [self = shared_from_this(), place](std::byte*) { self->give_back(place); }};
  const auto& wanted_back = *memory_.at<std::atomic<std::uint64_t>>(place + kWantedBack);
  return {std::move(data), wanted_back.load(std::memory_order_relaxed) != 0};
}

const char* PeerBuffer::claim(std::uint64_t place, std::uint64_t number, std::uint64_t bytes) {
  if (bytes == 0 || bytes > kLargest || place % kPage != 0 || !memory_.holds(place, kHeader) ||
      !memory_.holds(place + kHeader, page_end(bytes)))
    return "a part beyond the memory that it lends";
  const std::uint64_t end = place + kHeader + page_end(bytes);
  std::lock_guard lock(mutex_);
  auto next = held_.lower_bound(place);
  if ((next != held_.end() && next->first < end) ||
      (next != held_.begin() && std::prev(next)->second.end > place))
    return "a part in memory that it has lent already";
  if (number == 0 || number >= kTaken) return "a loan that cannot be";
  auto& word = *memory_.at<std::atomic<std::uint64_t>>(place);
  if (!word.compare_exchange_strong(number, number | kTaken, std::memory_order_acq_rel))
    return "a part that it has not lent, or has taken back";
  held_.emplace_hint(next, place, Held{end});
  return nullptr;
}

void PeerBuffer::give_back(std::uint64_t place) {
  if (process_ != process.load(std::memory_order_relaxed)) return;  // a forked child has taken nothing
  std::lock_guard lock(mutex_);
  auto found = held_.find(place);
  if (found->second.kind == Kind::kInherited) return;
  if (found->second.kind == Kind::kPrivate && !map(place, found->second.end, true)) return;
  held_.erase(found);
  memory_.at<std::atomic<std::uint64_t>>(place)->store(0, std::memory_order_release);
}

// Maps the data of a block again, shared with the sender or private, and replaces its first mapping, which
// remains if that fails: a failed mmap() at the same address could leave no mapping.
bool PeerBuffer::map(std::uint64_t place, std::uint64_t end, bool shared) {
  if (!pages_are_small()) return false;
  const std::uint64_t begin = place + kHeader, bytes = end - begin;
  void* other = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     shared ? MAP_SHARED | MAP_NORESERVE : MAP_PRIVATE, fd_, static_cast<off_t>(begin));
  if (other == MAP_FAILED) return false;
  if (mremap(other, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, memory_.base() + begin) != MAP_FAILED)
    return true;
  munmap(other, bytes);
  return false;
}

// Requires the lock: makes all blocks private.  Adding 0 makes the kernel copy a page, and loses no write of
// another thread.
void PeerBuffer::separate() {
  if (process_ != process.load(std::memory_order_relaxed)) return;
  for (auto& [place, held] : held_) {
    if (held.kind != Kind::kShared) continue;
    held.kind = map(place, held.end, false) ? Kind::kPrivate : Kind::kInherited;
    if (held.kind == Kind::kInherited) continue;
    for (std::uint64_t at = place + kHeader; at < held.end; at += kPage)
      std::atomic_ref<std::uint64_t>(*memory_.at<std::uint64_t>(at)).fetch_add(0, std::memory_order_relaxed);
  }
}

std::shared_ptr<PeerBuffer> PeerMemories::open(int fd) {
  struct stat info{};
  struct statfs system{};
  constexpr long kTmpfs = 0x01021994;  // hugetlbfs could cause a SIGBUS on reading
  if (fstat(fd, &info) != 0 || fstatfs(fd, &system) != 0 || system.f_type != kTmpfs || info.st_size <= 0 ||
      static_cast<std::uint64_t>(info.st_size) > kLargest)
    throw BadMemory("the shared memory is no memfd of at most a terabyte");
  std::erase_if(all_, [](const auto& entry) { return entry.second.expired(); });
  auto& known = all_[{info.st_dev, info.st_ino}];
  auto memory = known.lock();
  if (!memory) known = memory = std::make_shared<PeerBuffer>(fd, static_cast<std::size_t>(info.st_size));
  return memory;
}

}  // namespace shoal
