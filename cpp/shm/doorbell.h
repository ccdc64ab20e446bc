// The futex word that wakes a process, and other data that peers read at fixed offsets of its arena.
//
// A publisher stores its data, then rings; this costs a system call only if a thread sleeps.  A sleeper reads
// the word, registers, checks the data again, and only then waits for the word to change.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

#include "shm/liveness.h"

namespace shoal {

enum class Wake : int {
  Any,   // woken by slots, links and completions
  Link,  // woken only by frames on a link
  Call,  // woken only by wake()
};

struct alignas(64) Doorbell {
  std::atomic<std::uint32_t> word{0};
  std::atomic<std::uint32_t> sleepers_any{0};
  std::atomic<std::uint32_t> sleepers_link{0};

  std::uint32_t read() const { return word.load(std::memory_order_acquire); }

  // A slot was published or an operation completed.
  void ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleepers_any.load(std::memory_order_relaxed) != 0) wake();
  }
  // A frame was written.
  void ring_link() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if ((sleepers_any.load(std::memory_order_relaxed) | sleepers_link.load(std::memory_order_relaxed)) != 0)
      wake();
  }
  void wake() {
    word.fetch_add(1, std::memory_order_acq_rel);
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  // Registers a sleeper during its lifetime.  Check the data again after constructing it.
  class Sleeper {
   public:
    Sleeper(Doorbell& bell, Wake kind)
        : bell_(bell),
          count_(kind == Wake::Any    ? &bell.sleepers_any
                 : kind == Wake::Link ? &bell.sleepers_link
                                      : nullptr),
          seen_(bell.read()) {
      if (count_ != nullptr) count_->fetch_add(1, std::memory_order_seq_cst);
      std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    ~Sleeper() {
      if (count_ != nullptr) count_->fetch_sub(1, std::memory_order_relaxed);
    }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;
    // Sleeps until the bell has rung since construction, at most for this time.
    void sleep(std::int64_t nanoseconds) {
      if (nanoseconds <= 0) return;
      timespec limit{static_cast<time_t>(nanoseconds / 1'000'000'000),
                     static_cast<long>(nanoseconds % 1'000'000'000)};
      syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&bell_.word), FUTEX_WAIT, seen_, &limit, nullptr,
              0);
    }

   private:
    Doorbell& bell_;
    std::atomic<std::uint32_t>* count_;
    std::uint32_t seen_;
  };
};

// The location of a group's block in this process's arena, for peers.
struct DirectoryEntry {
  std::atomic<std::uint64_t> group{0};
  std::atomic<std::uint64_t> offset{0};
};

constexpr std::uint64_t kArenaMagic = 0x346c616f6873ULL;  // "shoal4"
constexpr std::size_t kDirectorySize = 4096;

// At offset 0 of every arena.
struct ArenaHeader {
  std::uint64_t magic = kArenaMagic;
  std::atomic<std::uint64_t> status{0};  // offset of the StatusPage, for other processes of the user
  Doorbell doorbell;
  ProcessLiveness life;
  alignas(64) std::atomic<int> core{-1};  // on which a thread of this process last moved data in wait()
  alignas(64) DirectoryEntry directory[kDirectorySize];
};

}  // namespace shoal
