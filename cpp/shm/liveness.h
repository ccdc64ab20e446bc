// Shared word through which peers detect that a process has died or is stopped.
//
// The kernel marks the word when the thread that holds it ends without releasing it.  That is long before the
// kernel has freed the process's memory, closed its sockets and signalled its pidfds (seconds for 2 GB).
//
// This is a robust futex (man 2 set_robust_list) instead of a robust pthread mutex: glibc keeps its list of
// such mutexes in the mutexes themselves, where a peer could write, and follows the list when it unlocks one.
// Here the list is in private memory.  A peer that writes to the word can only make this process look dead,
// or hide its death, and then the pidfd decides.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace shoal {

struct alignas(64) ProcessLiveness {
  std::atomic<std::uint32_t> holder{0};  // the thread's id; 0: not held, or released
  std::atomic<std::int64_t> beat{0};     // when (ns) the thread last ran; peers check whether it changes
  // Set by a peer that evicts the process because a signal has stopped it.  This is final: the other
  // processes of the host follow, and the process reads it if it continues.  A single word, so that all of
  // them see the same decision at any time.
  std::atomic<std::uint32_t> evicted{0};

  // The process is dead: all its threads had received the fatal signal before one could end.  Its memory may
  // still be mapped.  The kernel also clears the thread's id, so an erroneous write hardly looks like a mark.
  bool marked() const { return holder.load(std::memory_order_acquire) == FUTEX_OWNER_DIED; }
};
static_assert(sizeof(std::atomic<std::uint32_t>) == 4 && std::atomic<std::uint32_t>::is_always_lock_free);

// Holds a `ProcessLiveness` during its lifetime, for the constructing thread.  The thread must not use robust
// pthread mutexes meanwhile, because a thread has only one list.
class LivenessHold {
 public:
  explicit LivenessHold(ProcessLiveness& life) : life_(life) {
    robust_list* const list = &list_.list;
    entry_.next = list;
    list_.list.next = &entry_;
    // The word of an entry is at this distance from the entry, in whichever memory it is.
    list_.futex_offset = static_cast<long>(reinterpret_cast<std::intptr_t>(&life.holder) -
                                           reinterpret_cast<std::intptr_t>(&entry_));
    list_.list_op_pending = nullptr;
    if (syscall(SYS_get_robust_list, 0, &before_, &length_) != 0) return;  // may be denied in a sandbox
    life.holder.store(static_cast<std::uint32_t>(syscall(SYS_gettid)), std::memory_order_release);
    held_ = syscall(SYS_set_robust_list, &list_, sizeof list_) == 0;
    if (!held_) life.holder.store(0, std::memory_order_release);
  }
  ~LivenessHold() {
    if (!held_) return;
    life_.holder.store(0, std::memory_order_release);
    syscall(SYS_set_robust_list, before_, length_);
  }
  LivenessHold(const LivenessHold&) = delete;
  LivenessHold& operator=(const LivenessHold&) = delete;

 private:
  ProcessLiveness& life_;
  robust_list entry_{};
  robust_list_head list_{};
  robust_list_head* before_ = nullptr;  // glibc's list
  std::size_t length_ = 0;
  bool held_ = false;
};

}  // namespace shoal
