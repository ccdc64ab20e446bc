#include "rpc/shared_buffers.h"

#include <pthread.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <utility>

#include "common/clock.h"
#include "kernels/reduce.h"

namespace shoal {
namespace {

constexpr std::uint64_t kHeader = 64;           // bytes before a block's data, for the alignment of tensors
constexpr std::uint64_t kTaken = 1ULL << 63;    // in a block's word
constexpr std::uint64_t kLargest = 1ULL << 40;  // maximum bytes of a memory: several fit in an address space
constexpr std::size_t kChecksPerLease = 16;     // blocks that one loan checks, however many are lent
constexpr std::int64_t kLongestPause = 64 * kSecond;
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kStream = 16 << 20;  // larger copies bypass the caches

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

std::uint64_t whole_pages(std::uint64_t bytes) { return std::min(bytes, kLargest) / kPage * kPage; }

// -- forks: a child may read blocks that its parent holds, so these must not be returned ------------------

std::atomic<unsigned> forks{0};    // incremented before and after a fork, so that none is missed
std::atomic<unsigned> process{0};  // incremented in the child

void count_fork() { forks.fetch_add(1); }

void watch_forks() {
  static const int registered = pthread_atfork(count_fork, count_fork, [] { process.fetch_add(1); });
  (void)registered;
}

}  // namespace

// -- sending ----------------------------------------------------------------------------------------------

SharedBufferPool::SharedBufferPool(std::uint64_t limit, std::function<void()> sooner)
    : arena_(whole_pages(limit), whole_pages(limit)), sooner_(std::move(sooner)), tidy_at_(kNever) {}

std::unique_ptr<SharedBufferPool::Lease> SharedBufferPool::lend(int peer, const std::byte* data,
                                                                std::uint64_t bytes) {
  std::uint64_t place;
  {
    std::lock_guard lock(mutex_);
    look(kChecksPerLease);
  }
  try {
    place = arena_.allocate(kHeader + bytes);
  } catch (const OutOfMemory&) {
    return nullptr;
  }
  kernels::copy(arena_.mapping().base() + place + kHeader, data, bytes, bytes >= kStream);
  std::lock_guard lock(mutex_);
  const std::uint64_t number = ++loans_;
  word(place).store(number, std::memory_order_release);
  table_.emplace(place, Lent{number, peer});
  pause_ = kSecond;
  if (const std::int64_t at = now_ns() + pause_; at < tidy_at_) {
    tidy_at_ = at;
    if (sooner_) sooner_();
  }
  return std::make_unique<Lease>(shared_from_this(), place, number);
}

// Takes the block back; false if the peer has taken it.
bool SharedBufferPool::untaken(const Table::value_type& entry) {
  std::uint64_t number = entry.second.number;
  return word(entry.first).compare_exchange_strong(number, 0, std::memory_order_acq_rel);
}

SharedBufferPool::Table::iterator SharedBufferPool::free(Table::iterator at) {
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

PeerBuffer::PeerBuffer(int fd, std::size_t length)
    : memory_(fd, length, Mapping::kInherited), process_(process.load()) {
  watch_forks();
}

std::shared_ptr<std::byte> PeerBuffer::take(std::uint64_t place, std::uint64_t number, std::uint64_t bytes,
                                            const char*& flaw) {
  flaw = claim(place, number, bytes);
  if (flaw != nullptr) return nullptr;
  return {memory_.base() + place + kHeader,
          [self = shared_from_this(), place](std::byte*) { self->give_back(place); }};
}

const char* PeerBuffer::claim(std::uint64_t place, std::uint64_t number, std::uint64_t bytes) {
  if (bytes == 0 || place % kHeader != 0 || !memory_.holds(place, kHeader) ||
      !memory_.holds(place + kHeader, bytes))
    return "a part beyond the memory that it lends";
  const std::uint64_t end = place + kHeader + bytes;
  std::lock_guard lock(mutex_);
  auto next = held_.lower_bound(place);
  if ((next != held_.end() && next->first < end) ||
      (next != held_.begin() && std::prev(next)->second.end > place))
    return "a part in memory that it has lent already";
  if (number == 0 || number >= kTaken) return "a loan that cannot be";
  auto& word = *memory_.at<std::atomic<std::uint64_t>>(place);
  if (!word.compare_exchange_strong(number, number | kTaken, std::memory_order_acq_rel))
    return "a part that it has not lent, or has taken back";
  held_.emplace_hint(next, place, Held{end, forks.load()});
  return nullptr;
}

void PeerBuffer::give_back(std::uint64_t place) {
  if (process_ != process.load(std::memory_order_relaxed)) return;  // a forked child has taken nothing
  std::lock_guard lock(mutex_);
  auto found = held_.find(place);
  if (found->second.forks != forks.load()) return;  // a child may read the block, so keep it forever
  held_.erase(found);
  memory_.at<std::atomic<std::uint64_t>>(place)->store(0, std::memory_order_release);
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
