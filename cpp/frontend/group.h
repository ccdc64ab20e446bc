// A process group of a C++ program: numbers its operations, and knows whether it accepts more.
//
// The counterpart of src/shoal/group/submission.py and subgroups.py; a group may have Python ranks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/group.h"
#include "frontend/world.h"
#include "shoal/abi.h"

namespace shoal::frontend_core {

enum class State { kOpen, kClosing, kClosed, kAborted, kBroken, kForked };

// An operation, and the key of its future.
struct ProgramOperation {
  std::shared_ptr<World> world;
  OperationPtr operation;
  std::uint64_t key = 0;
  std::shared_ptr<std::atomic<bool>> reported;  // set if the program gets the error of its group
};

class ProgramGroup : public std::enable_shared_from_this<ProgramGroup> {
 public:
  static std::shared_ptr<ProgramGroup> of_all(const std::shared_ptr<World>& world);
  ~ProgramGroup();
  ProgramGroup(const ProgramGroup&) = delete;
  ProgramGroup& operator=(const ProgramGroup&) = delete;

  int rank() const { return core_->rank(); }
  int size() const { return core_->size(); }
  const std::vector<int>& ranks() const { return core_->ranks(); }
  const std::string& name() const { return core_->name(); }
  double timeout() const { return timeout_; }
  const World& world() const { return *world_; }
  State state();

  // These throw Failure.
  ProgramOperation submit(const shoal_call& call);
  ProgramOperation submit(const shoal_message& message);
  std::shared_ptr<ProgramGroup> split(const std::int64_t* color, std::int64_t key, double timeout);
  std::shared_ptr<Block> allocate(std::uint64_t bytes);
  void abort(const std::string& reason);
  bool begin_close();          // false: it is closed already
  void close(double timeout);  // seconds; 0: that of the group

 private:
  // options: all but `hosts` and `agreements`.
  ProgramGroup(std::shared_ptr<World> world, Group::Options options, double timeout, bool is_first);
  ProgramOperation go(Request request, bool numbered);
  // The failure of the group, if it is broken; reports it to the launcher if other ranks caused it.
  std::optional<Error> failure_of_group();
  // Locks mutex_; throws Failure if the group accepts no operations.
  std::unique_lock<std::mutex> lock_usable();
  [[noreturn]] void refuse(const std::string& operation, const std::string& why) const;
  double checked(double timeout) const;

  std::shared_ptr<World> world_;
  std::shared_ptr<Group> core_;
  const bool is_first_;
  const double timeout_;  // seconds

  std::mutex mutex_;  // held while an operation is numbered and submitted
  std::uint64_t number_ = 0;
  State local_ = State::kOpen;  // from the calls on this rank: not kBroken
  std::string abort_reason_;
  const std::shared_ptr<std::atomic<bool>> reported_ = std::make_shared<std::atomic<bool>>(false);
  std::mutex closing_;
};

// Waits until `until` (ns).  Returns whether it is done; throws the Failure of a failed operation.
bool wait(const ProgramOperation& operation, std::int64_t until);

}  // namespace shoal::frontend_core
