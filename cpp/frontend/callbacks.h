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

// The identity of a running callback: key and index among those of its future.
struct CallbackScope {
  std::uint64_t key = 0, index = 0, issued = 0;
  CallbackScope* outer = nullptr;
  std::uint64_t next_key() { return derive_key("operation", {key, index, issued++}); }
};
// That of the current thread; null: none, or its future has no key.
CallbackScope*& callback_scope();

}  // namespace shoal::frontend_core
