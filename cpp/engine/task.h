// Coroutines for operations: sequential code that suspends where it must wait.
//
// A Task starts when it is awaited or resumed, and runs until it awaits a Condition that is not ready.  A
// thread that later finds it ready resumes it (Operation::step).  Destroying a suspended Task runs the
// destructors of its objects, which cancels the messages of a failed operation.
//
// Tasks, and conditions with a lambda, are named before they are awaited: g++ 11 may destroy temporaries of
// such an expression twice.
#pragma once

#include <coroutine>
#include <exception>
#include <utility>

namespace shoal {

// The condition that an operation waits for.  It is in the coroutine's frame.
class Condition {
 public:
  enum class Type {
    kRung,     // the doorbell rings when it becomes ready
    kPolled,   // nothing wakes a thread when it becomes ready, so threads must call ready() often
    kArrival,  // as kRung; it waits for members to call the operation, which counts as waiting
  };
  explicit Condition(Type type = Type::kRung) : type(type) {}
  virtual bool ready() = 0;
  const Type type;

 protected:
  ~Condition() = default;
};

class Task {
 public:
  struct promise_type {
    std::coroutine_handle<> continuation;
    std::exception_ptr error;

    Task get_return_object() { return Task(std::coroutine_handle<promise_type>::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    struct Final {
      bool await_ready() noexcept { return false; }
      std::coroutine_handle<> await_suspend(std::coroutine_handle<promise_type> self) noexcept {
        auto next = self.promise().continuation;
        return next ? next : std::noop_coroutine();
      }
      void await_resume() noexcept {}
    };
    Final final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }
  };

  Task() = default;
  explicit Task(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      reset();
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  ~Task() { reset(); }

  void reset() {
    if (handle_) handle_.destroy();
    handle_ = nullptr;
  }
  std::coroutine_handle<> handle() const { return handle_; }
  bool finished() const { return handle_ && handle_.done(); }
  void rethrow() const {
    if (handle_ && handle_.promise().error) std::rethrow_exception(handle_.promise().error);
  }

  // co_await of another task: runs it to completion, then continues.
  bool await_ready() const noexcept { return false; }
  std::coroutine_handle<> await_suspend(std::coroutine_handle<> caller) noexcept {
    handle_.promise().continuation = caller;
    return handle_;
  }
  void await_resume() const { rethrow(); }

 private:
  std::coroutine_handle<promise_type> handle_;
};

}  // namespace shoal
