#include "frontend/callbacks.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "frontend/blake2b.h"

namespace shoal::frontend_core {
namespace {

constexpr std::chrono::seconds kIdleTime{2};  // after which a thread ends

thread_local CallbackScope* current_scope = nullptr;

struct Task {
  void (*fn)(void*);
  void* argument;
};

struct Pool {
  std::mutex mutex;
  std::condition_variable ready;
  std::vector<Task> tasks;  // the oldest first
  std::size_t idle = 0;

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      ++idle;
      const bool due = ready.wait_for(lock, kIdleTime, [this] { return !tasks.empty(); });
      --idle;
      if (!due) return;
      const Task task = tasks.front();
      tasks.erase(tasks.begin());
      lock.unlock();
      task.fn(task.argument);
      lock.lock();
    }
  }
};

// Never destroyed: its threads may outlive static objects.
Pool& pool() {
  alignas(Pool) static char memory[sizeof(Pool)];
  static Pool* const made = new (memory) Pool;
  return *made;
}

}  // namespace

void run_in_callback_thread(void (*fn)(void*), void* argument) {
  Pool& all = pool();
  const std::lock_guard lock(all.mutex);
  if (all.idle <= all.tasks.size()) std::thread([&all] { all.run(); }).detach();
  all.tasks.push_back({fn, argument});
  all.ready.notify_one();
}

void forget_callback_threads() { new (&pool()) Pool; }

std::uint64_t derive_key(const char* purpose, std::initializer_list<std::uint64_t> parts) {
  const std::string_view bytes(reinterpret_cast<const char*>(parts.begin()),
                               parts.size() * sizeof(std::uint64_t));
  const std::uint64_t key = digest64(bytes, purpose) & ~(1ULL << 63);
  return key == 0 ? 1 : key;
}

CallbackScope::CallbackScope(std::uint64_t key, std::uint64_t index)
    : key_(key), index_(index), outer_(current_scope) {
  current_scope = key == 0 ? nullptr : this;
}

CallbackScope::~CallbackScope() { current_scope = outer_; }

CallbackScope* CallbackScope::current() { return current_scope; }

}  // namespace shoal::frontend_core
