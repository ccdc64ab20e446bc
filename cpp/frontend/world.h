// The connections of this program to the others of its job; see src/shoal/world.py.
//
// Closing the last group closes the connections and leaves the rendezvous.  At the end of the process, open
// groups are closed, so that the other ranks see a regular close and not a lost connection.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "engine/context.h"
#include "frontend/membership.h"
#include "frontend/trace_file.h"

namespace shoal::frontend_core {

class ProgramGroup;

class World : public std::enable_shared_from_this<World> {
 public:
  // Meets the other ranks and connects to them.  Throws Failure.
  static std::shared_ptr<World> connect(const Options& options);
  ~World();

  const Member& member() const { return membership_.member(); }
  Context& context() const { return *context_; }
  int host(int rank) const { return hosts_[rank]; }
  bool forked() const { return forked_; }

  // Calls `fn(argument)` in the notifier thread when the operation is done, or here and now if it is.
  void notify(const OperationPtr& operation, void (*fn)(void*), void* argument);
  // Reports to the launcher that an error was caused by other ranks, of the first group.
  void report_told(const std::vector<int>& ranks) const;

  // options: of the group.
  void add(ProgramGroup& group, const Group::Options& options);
  // Removes a closed group; the last one closes the connections, until `deadline` (ns).
  void remove(ProgramGroup& group, std::int64_t deadline);

 private:
  explicit World(const Options& options) : membership_(options) {}
  void connect();
  void run_callbacks(std::int64_t ticket);
  void run_notifier();
  void stop_notifier();
  void close_groups();
  void become_forked();

  static void at_exit();
  static void after_fork_in_child();

  Membership membership_;
  std::shared_ptr<Context> context_;
  std::unique_ptr<TraceFile> trace_;  // null: not traced
  std::vector<int> hosts_{0};
  const std::int64_t begun_ = now_ns();
  bool same_numbers_ = false;  // ranks have the launcher's numbers
  std::atomic<bool> forked_{false};

  std::mutex groups_mutex_;
  std::vector<ProgramGroup*> groups_;
  bool is_released_ = false;  // the last group is closed, and the rendezvous left
  std::condition_variable released_;

  struct Waiting {
    OperationPtr operation;
    std::vector<std::pair<void (*)(void*), void*>> callbacks;
  };
  std::mutex notifier_mutex_;
  std::map<std::int64_t, Waiting> waiting_;  // by ticket: the address of the operation
  std::thread notifier_;
  bool stopped_ = false;
};

}  // namespace shoal::frontend_core
