// The pending operations of a group, and the threads that run them.
//
// A numbered operation belongs to a lane, whose operations run one after another; keyed operations and
// messages are loose: each has its own lane.  The holder of a lane's token runs it: a submitting thread, a
// waiting thread, or a progress thread for lanes that no thread waits for.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/operation.h"
#include "engine/statistics.h"

namespace shoal {

// Least pause between two steps of an operation that must be driven often.
constexpr std::int64_t kPollPause = 50'000;  // nanoseconds

// Operations that no thread waits for: none; some; some that must be driven often.
enum class Remaining { kNone, kSome, kPolled };

class Lanes {
 public:
  Lanes(Group& group, int count);

  // Takes an operation; runs it if it is small, begins it if it is large.
  void submit(const OperationPtr& op);
  // Drives everything that must precede the completion of `op`; true if anything moved.
  bool drive(Operation& op);
  // Drives everything that no thread waits for.  Raises `remaining` to what is left of it.
  bool progress(Remaining& remaining);
  // Whether threads that wait for `op` must drive it often, because nothing wakes them.
  bool polled(const Operation& op);
  bool pending();
  // A thread that waits for `op` begins, or stops, driving its lane.
  void add_waiter(Operation& op);
  void remove_waiter(Operation& op);

  // Timed-out operations, and operations at the head of a lane that stall (each is reported once).  Lowers
  // `next` to the time of the next check.
  struct Late {
    std::vector<OperationPtr> overdue, stalled;
  };
  Late late(std::int64_t now, std::int64_t& next);

  // A numbered operation has completed without an error.
  void completed(const Operation& op);
  // The last numbered operation that has completed here together with all earlier ones; -1: none.
  std::int64_t last_completed() const;
  // The first numbered operation that has not ended; ~0: all have ended.
  std::uint64_t first_pending();

  // The counters of an operation; requires the token of its lane.
  Statistics& statistics(const Operation& op) {
    return op.request().numbered() ? statistics_[op.request().channel % lanes_.size()] : statistics_.back();
  }
  StatisticsValues statistics() const;
  // The oldest of the operations for which threads wait, or else of all.
  struct Foremost {
    OperationPtr operation;
    bool awaited = false;  // threads wait for it

    void consider(const OperationPtr& other, bool other_awaited) {
      if (!other || (awaited && !other_awaited)) return;
      if (operation && awaited == other_awaited && other->submitted() >= operation->submitted()) return;
      operation = other;
      awaited = other_awaited;
    }
  };
  // The state of the pending operations.
  struct Pending {
    std::size_t count = 0;
    Foremost foremost;              // without receives for which no thread waits: programs post them early
    std::vector<LateMember> waits;  // that have not ended, by operation; rank: -1 if it is not known for whom
  };
  Pending pending_at(std::int64_t now);

 private:
  struct Lane {
    std::atomic_flag token;
    std::atomic<bool> missed{false};  // a thread found the token taken
    std::atomic<bool> polled{false};  // its first operation must be driven often
    std::atomic<int> waiters{0};      // threads in wait() that drive this lane
    std::mutex mutex;
    std::deque<OperationPtr> queue;
    std::atomic<std::uint64_t> next{0};  // number of the first operation that has not completed
  };
  struct UnorderedOperation {
    OperationPtr op;
    std::shared_ptr<Lane> lane;
  };
  // How far operations are run: a submitting thread only begins the large ones.
  enum class RunMode { kBegin, kWhole };
  bool run(Lane& lane, RunMode effort = RunMode::kWhole);
  bool run_held(Lane& lane, RunMode effort);
  void drop_done();  // requires loose_mutex_
  // Calls look(operation, is_first, has_waiters) for each that is not done; is_first: nothing precedes it.
  template <class Look>
  void each_pending(Look look);
  Lane& lane_of(const Operation& op) { return lanes_[op.request().channel % lanes_.size()]; }

  Group& group_;
  std::deque<Lane> lanes_;
  std::deque<Statistics> statistics_;  // of each lane, then of the operations without one
  std::mutex loose_mutex_;
  std::vector<UnorderedOperation> unordered_;
  std::atomic<int> loose_count_{0};
};

}  // namespace shoal
