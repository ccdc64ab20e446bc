// One operation of a group, from submission to completion.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/error.h"
#include "engine/task.h"
#include "kernels/reduce.h"
#include "net/frame.h"
#include "net/link.h"

namespace shoal {

class Group;
class Messages;
class Operation;

constexpr std::uint64_t kKeyed = 1ULL << 62;  // channels of operations that are matched by key

// How members exchange data over links: chosen by the size and the number of members; all with all; or in a
// logarithmic number of steps, with all data in each of them or with halves of it; or around a ring.
enum class Algorithm : std::uint8_t { kAuto, kDirect, kDoubling, kHalving, kRing };
constexpr int kAlgorithms = 5;

// A peer wrote invalid data into shared memory.  Ends the group of the operation that throws it.
class InvalidPeerData : public std::runtime_error {
 public:
  InvalidPeerData(int rank, const std::string& what) : std::runtime_error(what), rank(rank) {}
  const int rank;  // in the group
};

// A mover cannot move the data of an operation.  Ends the group of the operation that throws it.
class MoverFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Span {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};

inline bool overlap(const Span& a, const Span& b) {
  return a.bytes > 0 && b.bytes > 0 && a.data < b.data + b.bytes && b.data < a.data + a.bytes;
}

inline std::uint64_t total(const std::vector<Span>& spans) {
  std::uint64_t bytes = 0;
  for (const Span& span : spans) bytes += span.bytes;
  return bytes;
}

// A validated call from the binding.  Spans follow the table in src/shoal/spec.py.
struct Request {
  // The coroutine of an operation, which the engine drives without further knowledge of it.
  using Algorithm = Task (*)(Operation&);
  Request(Kind kind, Algorithm algorithm) : kind(kind), algorithm(algorithm) {}

  Kind kind;
  Algorithm algorithm;
  std::uint64_t channel = 0;  // sequence number, or kKeyed | key
  std::vector<Span> in;
  std::vector<Span> out;
  kernels::Reduction reduction{};
  std::uint64_t count = 0;  // elements, if equal on all ranks
  std::int32_t root = -1;
  std::vector<std::uint64_t> sizes;  // bytes of each part, if known on all ranks
  std::int64_t timeout = 0;          // nanoseconds
  std::int32_t peer = -1;
  std::uint64_t tag = 0;
  Shape shape;
  // Another engine moves the data: the members only meet and compare their calls.  Then the mover of the
  // group moves the data; in a group without one, the operation is complete after
  // Operation::finish_external().
  bool external = false;
  bool on_device = false;  // the tensors of an external operation are not on the CPU

  // How the members communicate.
  Kind pattern() const { return external ? Kind::kBarrier : kind; }
  std::uint64_t bytes() const { return total(in) + total(out); }
  bool collective() const { return kind < Kind::kSend; }
  bool keyed() const { return (channel & kKeyed) != 0; }
  // Whether it has a number and a lane: it is neither matched by key nor a message.
  bool numbered() const { return collective() && !keyed(); }
};

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  Operation(std::shared_ptr<Group> group, Request request);
  ~Operation();

  const Request& request() const { return request_; }
  const Fingerprint& call() const { return call_; }
  Group& group() const { return *group_; }
  std::int64_t submitted() const { return submitted_; }
  std::int64_t ended() const { return ended_; }  // once done
  std::int64_t deadline() const { return deadline_; }
  // Large operations are left to other threads by the submitting thread.
  bool large() const { return large_; }

  bool done() const { return state_.load(std::memory_order_acquire) & kDoneBit; }
  const Error& error() const { return error_; }  // once done
  // Whether it has timed out; whether it has run so long that its call must be compared with a neighbour's
  // (reported once).  Lowers `next` to the time of the next check.
  bool overdue(std::int64_t now, std::int64_t& next) const;
  bool is_stalled(std::int64_t now, std::int64_t& next);
  // True if the operation is already done; otherwise the context's tickets receive `ticket` when it is.
  bool notify_with(std::int64_t ticket);

  // Runs as far as possible; true if anything moved.  Requires the token of its lane.
  bool step();
  // Runs a large operation up to `begun`, in the thread that submits it.
  bool begin();
  void fail(Error error);
  // Fails only this operation, unless it completes first; safe from any thread.  The next holder of its
  // lane's token executes it.
  void end(Error error);
  bool ending() const { return ending_.load(std::memory_order_acquire) == kEnding; }
  // Cancels the operation; nothing touches the user's memory after this returns.  False for a collective, or
  // if it has ended otherwise.
  bool cancel();
  // External operations: whether all members have met, and whether the engine has moved the data here.
  bool met() const { return met_.load(std::memory_order_acquire); }
  void set_met() { met_.store(true, std::memory_order_release); }
  bool finished_externally() const { return finished_externally_.load(std::memory_order_acquire); }
  void finish_external();
  // Whether threads must call step() often, because nothing wakes them.  Requires the token of its lane.
  bool polled() const { return waiting_for_ != nullptr && waiting_for_->type == Condition::Type::kPolled; }
  // It has failed while a mover used its memory: that memory must be kept until the process ends.
  void abandon();
  bool abandoned() const { return abandoned_.load(std::memory_order_acquire); }
  // In a forked child, an unfinished operation never completes: fails it and returns true.
  bool orphaned();

  // Waits inside the operation's coroutine: co_await op.until([&] { return ...; }).
  template <class Predicate>
  class Until final : public Condition {
   public:
    Until(Operation& op, Predicate predicate, Type type)
        : Condition(type), op_(op), predicate_(std::move(predicate)) {}
    bool await_ready() { return predicate_(); }
    void await_suspend(std::coroutine_handle<> self) {
      op_.waiting_for_ = this;
      op_.resume_ = self;
    }
    void await_resume() {
      // ready() must not throw: a predicate that can fail throws here, within the coroutine.
      if constexpr (requires { predicate_.check(); }) predicate_.check();
    }
    bool ready() override { return predicate_(); }

   private:
    Operation& op_;
    Predicate predicate_;
  };
  template <class Predicate>
  Until<Predicate> until(Predicate predicate) {
    return Until<Predicate>(*this, std::move(predicate), Condition::Type::kRung);
  }
  // For predicates that wait for members to call the operation.
  template <class Predicate>
  Until<Predicate> until_called(Predicate predicate) {
    return Until<Predicate>(*this, std::move(predicate), Condition::Type::kArrival);
  }
  // For predicates that become true without a ring of the doorbell.
  template <class Predicate>
  Until<Predicate> poll_until(Predicate predicate) {
    return Until<Predicate>(*this, std::move(predicate), Condition::Type::kPolled);
  }
  auto never() {
    return until([] { return false; });
  }
  // Awaited when an algorithm has notified the peers, before it moves many bytes: the submitting thread of a
  // large operation stops here.
  class Begun final : public Condition {
   public:
    explicit Begun(Operation& op) : op_(op) {}
    bool await_ready() const { return !op_.beginning_; }
    void await_suspend(std::coroutine_handle<> self) {
      op_.waiting_for_ = this;
      op_.resume_ = self;
    }
    void await_resume() const {}
    bool ready() override { return true; }

   private:
    Operation& op_;
  };
  Begun begun() { return Begun(*this); }
  // A peer has a different call for this operation: starts an inquiry; never returns.
  Task mismatch();
  // Called by predicates that are false because of a member: it has not called the operation, or has not
  // moved its data.  Any thread may read which member it is; -1: none, or unknown.  It is this rank if that
  // member had to wait for this one.
  void set_blocker(int rank) { blocker_.store(rank, std::memory_order_relaxed); }
  int blocker() const { return blocker_.load(std::memory_order_relaxed); }
  int other_blocker() const { return other(blocker()); }  // -1: also this rank
  // The member `rank` was late only because it had to wait for `last`; -1: it did not.
  void pass_blocker(int rank, int last) {
    if (last >= 0 && rank >= 0 && blocker() == rank) set_blocker(last);
  }
  // Since when it waits for members to call it; 0: it does not.  Any thread may read it.
  std::int64_t waits_since() const { return waits_since_.load(std::memory_order_relaxed); }
  // Threads that wait for it, if it has no lane.
  void add_waiter(int change) { waiters_.fetch_add(change, std::memory_order_relaxed); }
  bool has_waiters() const { return waiters_.load(std::memory_order_relaxed) > 0; }
  // The member that called the operation last of those that this rank had to wait for; -1: none.
  int last_to_call() const { return last_to_call_; }
  // Whether it has waited for the members whose messages it needs first.  With `has_steps`, it also waits for
  // members in later steps, which need their data from others.
  bool all_called = false, has_steps = false;

  // Memory for the algorithm, with any contents.
  std::shared_ptr<std::byte> scratch(std::uint64_t bytes);

  std::shared_ptr<Incoming> received;  // RECV: the message
  std::vector<Messages*> messages;     // its current messages

 private:
  void complete();
  void end_wait();
  int other(int rank) const;
  static constexpr int kDoneBit = 1;
  static constexpr int kAnnounceBit = 2;

  std::shared_ptr<Group> group_;
  Request request_;
  Fingerprint call_;
  std::uint64_t bytes_;  // the longer of input and output
  bool large_;
  bool beginning_ = false;  // begin() is running; guarded by the token
  const std::int64_t submitted_;
  std::int64_t ended_ = 0;
  std::int64_t deadline_;
  std::int64_t ask_at_;  // time of the comparison of calls with a neighbour
  std::atomic<bool> abandoned_{false};
  Task task_;
  std::coroutine_handle<> resume_;
  Condition* waiting_for_ = nullptr;
  // Guarded by the token.
  std::int64_t begun_ = 0;  // only while a trace is on
  std::atomic<std::int64_t> waits_since_{0};
  std::int64_t waited_since_ = 0, called_ = 0;  // begin of its first such wait and end of its last one
  int last_to_call_ = -1;
  std::atomic<int> blocker_{-1}, waiters_{0};
  std::atomic<int> state_{0};
  std::int64_t ticket_ = 0;
  Error error_;
  static constexpr int kClaimed = 1, kEnding = 2;
  std::atomic<int> ending_{0};
  std::atomic<bool> met_{false};
  std::atomic<bool> finished_externally_{false};
  Error cause_;  // set before ending_ becomes kEnding
  friend class Group;
};

using OperationPtr = std::shared_ptr<Operation>;

}  // namespace shoal
