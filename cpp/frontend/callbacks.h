// Threads for callbacks of futures, and the keys of operations that callbacks start.
//
// A callback may block, also in a wait for another callback.  So each callback that is due gets a thread: an
// idle one, or a new one.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace shoal::frontend_core {

// Runs `fn(argument)` in a thread for callbacks; throws std::system_error if no thread can be started.
void run_in_callback_thread(void (*fn)(void*), void* argument);
// In a forked child: forgets the threads, which only the parent has.
void forget_callback_threads();

// See derive_key in src/shoal/future/scope.py.
std::uint64_t derive_key(const char* purpose, std::initializer_list<std::uint64_t> parts);

// The identity of the callback that the current thread runs while this object lives: the key of its future,
// and its index among the callbacks of that.  key: 0: the future has none, and operations are numbered.
class CallbackScope {
 public:
  CallbackScope(std::uint64_t key, std::uint64_t index);
  ~CallbackScope();
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;

  // That of the current thread; null: there is none, or its future has no key.
  static CallbackScope* current();
  std::uint64_t next_key() { return derive_key("operation", {key_, index_, issued_++}); }

 private:
  const std::uint64_t key_, index_;
  std::uint64_t issued_ = 0;
  CallbackScope* const outer_;
};

}  // namespace shoal::frontend_core
