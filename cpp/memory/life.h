// Where peers read that a process has died, or does nothing.
//
// The kernel marks the word when the thread that holds it ends without letting go, which is long before it
// has freed the process's memory, closed its sockets and told its pidfds: 2 GB take it seconds.
//
// This is a robust futex (man 2 set_robust_list), and no robust mutex of pthreads: glibc keeps its list of
// such mutexes in the mutexes themselves, where a peer could write, and writes to where the list leads when
// one is unlocked.  Here the list lies in our own memory.  So a peer that writes to the word can make us look
// dead, or our death look like none, and then the pidfd tells; it can do nothing else.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace shoal {

struct alignas(64) Life {
  std::atomic<std::uint32_t> holder{0};  // the thread's number; 0: nobody holds it, or has let go
  std::atomic<std::int64_t> beat{0};     // when (ns) the thread last ran; peers look whether it changes
  // Set by a peer that gives the process up because a signal has stopped it, for good: the others on the host
  // follow, and the process, should it go on, reads here that it is out.  One word, so that there is no
  // moment at which some of them still count on it and others do not.
  std::atomic<std::uint32_t> given_up{0};

  // The process is dead: all its threads were sent their signals before one could end.  Its memory may still
  // be mapped.  The kernel takes the thread's number away, so words that are written by mistake hardly mark
  // it.
  bool marked() const { return holder.load(std::memory_order_acquire) == FUTEX_OWNER_DIED; }
};
static_assert(sizeof(std::atomic<std::uint32_t>) == 4 && std::atomic<std::uint32_t>::is_always_lock_free);

// Holds a life for as long as it lives, for the thread that makes it.  The thread must use no robust mutex of
// pthreads meanwhile: a thread has one list.
class Holding {
 public:
  explicit Holding(Life& life) : life_(life) {
    robust_list* const list = &list_.list;
    entry_.next = list;
    list_.list.next = &entry_;
    // The word of an entry is at this distance from it, whatever memory it is in.
    list_.futex_offset = static_cast<long>(reinterpret_cast<std::intptr_t>(&life.holder) -
                                           reinterpret_cast<std::intptr_t>(&entry_));
    list_.list_op_pending = nullptr;
    if (syscall(SYS_get_robust_list, 0, &before_, &length_) != 0) return;  // a sandbox may refuse it
    life.holder.store(static_cast<std::uint32_t>(syscall(SYS_gettid)), std::memory_order_release);
    held_ = syscall(SYS_set_robust_list, &list_, sizeof list_) == 0;
    if (!held_) life.holder.store(0, std::memory_order_release);
  }
  ~Holding() {
    if (!held_) return;
    life_.holder.store(0, std::memory_order_release);
    syscall(SYS_set_robust_list, before_, length_);
  }
  Holding(const Holding&) = delete;
  Holding& operator=(const Holding&) = delete;

 private:
  Life& life_;
  robust_list entry_{};
  robust_list_head list_{};
  robust_list_head* before_ = nullptr;  // glibc's
  std::size_t length_ = 0;
  bool held_ = false;
};

}  // namespace shoal
