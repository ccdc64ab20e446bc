// The future of an asynchronous operation.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "shoal/abi.h"
#include "shoal/error.h"
#include "shoal/types.h"

namespace shoal {
inline namespace frontend {

template <class T>
class Future;

namespace detail {

template <class T>
using Stored = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

// A time to wait that can be added to a time; not set: 30 years.
inline Seconds limit(std::optional<Seconds> timeout) {
  constexpr Seconds kForever{1e9};
  return std::max(Seconds(0), std::min(kForever, timeout.value_or(kForever)));
}

struct Latch {
  std::mutex mutex;
  std::condition_variable changed;
  bool set = false;
};

// The outcome of one future, which its copies share.
template <class T>
class FutureState {
 public:
  FutureState() = default;
  // Completed by an operation, which the state owns.
  // finish: called once, before anybody gets the value.  kept: lives until the operation is complete.
  FutureState(shoal_operation* operation, Stored<T> value, std::function<void(Stored<T>&)> finish = nullptr,
              std::shared_ptr<void> kept = nullptr)
      : operation_(operation, shoal_operation_free),
        key_(shoal_operation_key(operation)),
        value_(std::move(value)),
        finish_(std::move(finish)),
        kept_(std::move(kept)) {}
  FutureState(const FutureState&) = delete;
  FutureState& operator=(const FutureState&) = delete;

  // The tensors of an unfinished operation live until it is complete.
  ~FutureState() {
    if (!operation_ || shoal_operation_done(operation_.get())) return;
    using Kept =
        std::tuple<std::shared_ptr<shoal_operation>, std::optional<Stored<T>>, std::shared_ptr<void>>;
    const std::shared_ptr<shoal_operation> operation = operation_;
    auto* kept = new Kept(operation, std::move(value_), std::move(kept_));
    shoal_operation_notify(
        operation.get(), [](void* argument) { delete static_cast<Kept*>(argument); }, kept);
  }

  bool done() const {
    if (operation_) return shoal_operation_done(operation_.get()) != 0;
    const std::lock_guard lock(mutex_);
    return complete_;
  }

  // Returns once the outcome is known; throws WaitTimeout.
  void wait(std::optional<Seconds> timeout) {
    const double seconds = limit(timeout).count();
    bool done = true;
    if (operation_) {
      std::int32_t complete = 0;
      shoal_error* error = shoal_operation_wait(operation_.get(), seconds, &complete);
      done = complete != 0;
      check(error);
      if (done && finish_) std::call_once(finished_, [this] { finish_(*value_); });
    } else {
      std::unique_lock lock(mutex_);
      const auto known = [&] { return complete_; };
      done = changed_.wait_for(lock, Seconds(seconds), known);
      if (done && error_) std::rethrow_exception(error_);
    }
    if (!done) throw WaitTimeout("wait timed out; the operation is still in progress");
  }

  // Completes a future without an operation.
  template <class Assign>
  void complete(Assign assign) {
    std::vector<std::function<void()>> callbacks;
    {
      const std::lock_guard lock(mutex_);
      if (operation_ || complete_)
        throw InvalidFutureState("the future has an outcome already, or is completed by an operation");
      assign(*this);
      complete_ = true;
      callbacks.swap(callbacks_);
    }
    changed_.notify_all();
    for (auto& callback : callbacks) callback();
  }
  void set_value(Stored<T> value) {
    complete([&](FutureState& self) { self.value_ = std::move(value); });
  }
  void set_exception(std::exception_ptr error) {
    complete([&](FutureState& self) { self.error_ = std::move(error); });
  }

  // The index of the next callback.
  std::uint64_t next_callback() {
    const std::lock_guard lock(mutex_);
    return callback_count_++;
  }
  // Runs `callback` in a thread for callbacks, once the future is complete.
  void notify(std::function<void()> callback) {
    auto* task = new std::function<void()>(std::move(callback));
    const auto schedule = [](void* argument) {
      const auto run = [](void* given) {
        const std::unique_ptr<std::function<void()>> owner(static_cast<std::function<void()>*>(given));
        (*owner)();
      };
      if (shoal_error* error = shoal_run(run, argument)) {  // no thread can start: run it here
        shoal_error_free(error);
        run(argument);
      }
    };
    subscribe(schedule, task);
  }
  // Calls `fn(argument)`, which does not block, once the future is complete, in any thread.
  void subscribe(void (*fn)(void*), void* argument) {
    if (operation_) {
      shoal_operation_notify(operation_.get(), fn, argument);
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      if (!complete_) {
        callbacks_.push_back([fn, argument] { fn(argument); });
        return;
      }
    }
    fn(argument);
  }

  const Stored<T>& value() const { return *value_; }  // once it is complete without an error
  std::uint64_t key() const { return key_; }
  void set_key(std::uint64_t key) { key_ = key; }
  shoal_operation* operation() const { return operation_.get(); }

 private:
  std::shared_ptr<shoal_operation> operation_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool complete_ = false;
  std::uint64_t key_ = 0;
  std::uint64_t callback_count_ = 0;
  std::optional<Stored<T>> value_;
  std::function<void(Stored<T>&)> finish_;
  std::once_flag finished_;
  std::shared_ptr<void> kept_;
  std::exception_ptr error_;
  std::vector<std::function<void()>> callbacks_;
};

// Marks the operations of a callback for the time of its run.
class CallbackScope {
 public:
  CallbackScope(std::uint64_t key, std::uint64_t index) : token_(shoal_callback_enter(key, index)) {}
  ~CallbackScope() { shoal_callback_leave(token_); }
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;

 private:
  void* token_;
};

}  // namespace detail

/// The result of an asynchronous operation, of a callback, or of Promise.  Copies share one outcome.
///
/// A future that is dropped does not cancel its operation, and the operation keeps its tensors.
template <class T>
class Future {
 public:
  using Value = T;

  /// Whether the outcome is known: a value or an exception.
  bool done() const { return state_->done(); }

  /// Waits for the outcome and returns the value, or throws the exception.
  ///
  /// timeout: seconds to wait at most; afterwards WaitTimeout is thrown, and the operation continues.
  T wait(std::optional<Seconds> timeout = std::nullopt) const {
    state_->wait(timeout);
    if constexpr (!std::is_void_v<T>) return state_->value();
  }

  /// The value of a complete future; throws InvalidFutureState before, and the exception of a failure.
  T value() const {
    if (!done()) throw InvalidFutureState("the future is not complete: call wait() first");
    return wait();
  }

  /// The exception of a complete future; null: it has a value.  Throws InvalidFutureState before.
  std::exception_ptr exception() const {
    if (!done()) throw InvalidFutureState("the future is not complete: call wait() first");
    try {
      state_->wait(std::nullopt);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  /// Calls `fn(future)` when this future is complete, also if it failed, and returns the future of its
  /// result.
  ///
  /// The callback runs in a thread for callbacks, where it may block and start operations: these are matched
  /// between the ranks by the future and the order of its callbacks, so all ranks must add the same ones.
  /// An exception of `fn`, such as that of the failure if it calls `wait()`, is the outcome of the new
  /// future.
  template <class F>
  auto then(F fn) const -> Future<std::decay_t<std::invoke_result_t<F, Future<T>>>> {
    using R = std::decay_t<std::invoke_result_t<F, Future<T>>>;
    auto result = std::make_shared<detail::FutureState<R>>();
    auto state = state_;
    const std::uint64_t key = state->key();
    const std::uint64_t index = state->next_callback();
    if (key != 0) result->set_key(shoal_then_key(key, index));
    // Shared, because std::function copies what it contains, which `fn` may not allow.
    state->notify([state, result, key, index, fn = std::make_shared<F>(std::move(fn))] {
      const detail::CallbackScope scope(key, index);
      try {
        if constexpr (std::is_void_v<R>) {
          (*fn)(Future<T>(state));
          result->set_value({});
        } else {
          result->set_value((*fn)(Future<T>(state)));
        }
      } catch (...) {
        result->set_exception(std::current_exception());
      }
    });
    return Future<R>(result);
  }

  /// Cancels a send or receive on this rank; false: it is another operation, or has ended already.
  bool cancel() const {
    return state_->operation() != nullptr && shoal_operation_cancel(state_->operation()) != 0;
  }

  explicit Future(std::shared_ptr<detail::FutureState<T>> state) : state_(std::move(state)) {}
  // For wait_any.
  void subscribe(void (*fn)(void*), void* argument) const { state_->subscribe(fn, argument); }

 private:
  std::shared_ptr<detail::FutureState<T>> state_;
};

/// Waits for all of `futures` and returns a vector of their values, in order; nothing for Future<void>.
///
/// The exception of one that failed is thrown within a fraction of a second, also while others continue.
/// timeout: seconds for all together; afterwards WaitTimeout is thrown, and the operations continue.
template <class T>
auto wait_all(const std::vector<Future<T>>& futures, std::optional<Seconds> timeout = std::nullopt) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(detail::limit(timeout));
  for (const auto& future : futures) {
    while (!future.done()) {
      const Seconds left = end - Clock::now();
      try {
        future.wait(std::min(left, Seconds(0.1)));
      } catch (const WaitTimeout&) {
        if (!future.done() && left <= Seconds(0)) throw;
      }
      for (const auto& other : futures)
        if (other.done()) other.wait();  // throws if it failed
    }
  }
  if constexpr (std::is_void_v<T>) {
    for (const auto& future : futures) future.wait();
  } else {
    std::vector<T> values;
    for (const auto& future : futures) values.push_back(future.wait());
    return values;
  }
}

/// Waits until one of `futures` has completed or failed, and returns it; of several, the first in order.
///
/// timeout: seconds; afterwards WaitTimeout is thrown.  Throws UsageError if there are no futures.
template <class T>
Future<T> wait_any(const std::vector<Future<T>>& futures, std::optional<Seconds> timeout = std::nullopt) {
  if (futures.empty()) throw UsageError("wait_any needs at least one future, got none");
  const auto complete = [&] {
    return std::find_if(futures.begin(), futures.end(), [](const auto& future) { return future.done(); });
  };
  if (const auto found = complete(); found != futures.end()) return *found;
  using Shared = std::shared_ptr<detail::Latch>;  // a future may complete after the return
  const auto latch = std::make_shared<detail::Latch>();
  const auto set = [](void* argument) {
    const std::unique_ptr<Shared> owner(static_cast<Shared*>(argument));
    const std::lock_guard lock((*owner)->mutex);
    (*owner)->set = true;
    (*owner)->changed.notify_all();
  };
  for (const auto& future : futures) future.subscribe(set, new Shared(latch));
  std::unique_lock lock(latch->mutex);
  if (!latch->changed.wait_for(lock, detail::limit(timeout), [&] { return latch->set; }))
    throw WaitTimeout("wait timed out; none of the futures is complete");
  return *complete();
}

/// A future whose outcome the program sets.  Copies share one outcome.
///
/// If the last copy is destroyed without an outcome, that is the exception InvalidFutureState.
template <class T>
class Promise {
 public:
  Promise() : owner_(std::make_shared<Owner>()) {}
  Future<T> future() const { return Future<T>(owner_->state); }
  /// Sets the value; throws InvalidFutureState if there is an outcome.
  void set_value(detail::Stored<T> value = {}) const { owner_->state->set_value(std::move(value)); }
  /// Sets the exception; throws InvalidFutureState if there is an outcome.
  void set_exception(std::exception_ptr error) const { owner_->state->set_exception(std::move(error)); }

 private:
  struct Owner {
    Owner() = default;
    ~Owner() {
      if (!state->done())
        state->set_exception(std::make_exception_ptr(
            InvalidFutureState("the last copy of the promise was destroyed without an outcome")));
    }
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;
    const std::shared_ptr<detail::FutureState<T>> state = std::make_shared<detail::FutureState<T>>();
  };
  std::shared_ptr<Owner> owner_;
};

}  // namespace frontend
}  // namespace shoal
