#include "frontend/world.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <string_view>
#include <system_error>
#include <utility>

#include "collectives/calls.h"
#include "common/clock.h"
#include "frontend/callbacks.h"
#include "frontend/failure.h"
#include "frontend/group.h"
#include "frontend/reports.h"
#include "shm/arena.h"

namespace shoal::frontend_core {
namespace {

constexpr double kExitTimeout = 10.0;  // seconds for closing open groups at the end of the process
constexpr double kPollInterval = 1.0;  // seconds between the notifier's checks whether it must stop

// The connected worlds of this process.
struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<World>> worlds;
};

// Never destroyed: groups may be closed by destructors of static objects.
Registry& registry() {
  static auto* const made = new Registry;
  return *made;
}

int environment_number(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? -1 : std::atoi(value);
}

}  // namespace

std::shared_ptr<World> World::connect(const Options& options) {
  static const bool prepared = [] {
    return std::atexit(at_exit) == 0 && ::pthread_atfork(nullptr, nullptr, after_fork_in_child) == 0;
  }();
  if (!prepared)
    throw Failure{"OutOfResources", "the functions for the end of the process cannot be registered"};
  std::shared_ptr<World> world(new World(options));
  try {
    world->connect();
  } catch (const Failure& failure) {
    world->membership_.abandon(failure.message);
    throw;
  } catch (const std::exception& error) {
    world->membership_.abandon(error.what());
    throw;
  }
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.worlds.push_back(world);
  return world;
}

void World::connect() {
  const Context::Options& own = member().context;
  context_ = std::make_shared<Context>(own);
  try {
    std::vector<std::uint64_t> rings(own.size, 0);
    for (int rank = 0; rank < own.size; ++rank)
      if (rank != own.rank) rings[rank] = context_->make_ring();
    hosts_ = membership_.connect(context_->memory_fd(), context_->memory_capacity(), rings,
                                 [this](Connection& peer) {
                                   if (peer.memory < 0) {
                                     context_->add_remote(peer.rank, std::exchange(peer.socket, -1));
                                   } else {
                                     context_->add_local(peer.rank, peer.socket, peer.memory, peer.capacity,
                                                         peer.out, peer.in, peer.pid);
                                     peer.socket = -1;  // the core has it, and a mapping of the memory
                                   }
                                 });
    if (const int file = membership_.take_trace(); file >= 0)
      trace_ = std::make_unique<TraceFile>(file, context_);
    context_->start();
  } catch (...) {
    context_->close(now_ns());
    throw;
  }
  same_numbers_ =
      environment_number("SHOAL_RANK") == own.rank && environment_number("SHOAL_SIZE") == own.size;
}

World::~World() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.worlds, [](const auto& world) { return world.expired(); });
}

// -- notifications --------------------------------------------------------------------------------

void World::notify(const OperationPtr& operation, void (*fn)(void*), void* argument) {
  const auto ticket = reinterpret_cast<std::int64_t>(operation.get());
  try {
    const std::lock_guard lock(notifier_mutex_);
    // It keeps the world: a callback may close the last group.
    if (!notifier_.joinable() && !stopped_)
      notifier_ = std::thread([self = shared_from_this()] { self->run_notifier(); });
    Waiting& waiting = waiting_[ticket];
    waiting.callbacks.emplace_back(fn, argument);
    if (waiting.operation != nullptr) return;  // an operation has one ticket
    waiting.operation = operation;
  } catch (const std::system_error&) {  // no thread can start: wait here
    context_->wait(*operation, kNever);
    fn(argument);
    return;
  }
  if (operation->notify_with(ticket)) run_callbacks(ticket);
}

void World::run_callbacks(std::int64_t ticket) {
  std::unique_lock lock(notifier_mutex_);
  const auto waiting = waiting_.extract(ticket);
  lock.unlock();
  for (const auto& [fn, argument] : waiting.mapped().callbacks) fn(argument);
}

void World::run_notifier() {
  std::vector<std::int64_t> due;
  for (;;) {
    context_->tickets().wait(until(kPollInterval), due);
    for (const std::int64_t ticket : due) run_callbacks(ticket);
    // In a closed context every operation is done, so new notifications return at once.
    const std::lock_guard lock(notifier_mutex_);
    if (due.empty() && stopped_) return;
  }
}

void World::stop_notifier() {
  {
    const std::lock_guard lock(notifier_mutex_);
    stopped_ = true;
  }
  context_->tickets().nudge();
  if (!notifier_.joinable()) return;
  if (notifier_.get_id() == std::this_thread::get_id())
    notifier_.detach();
  else
    notifier_.join();
}

void World::report_told(const std::vector<int>& ranks) const {
  frontend_core::report_told(same_numbers_ ? ranks : std::vector<int>());
}

// -- groups ---------------------------------------------------------------------------------------

void World::add(ProgramGroup& group, const Group::Options& options) {
  if (trace_ != nullptr) trace_->add_group(options.ident, options.name, options.ranks, options.lanes);
  const std::lock_guard lock(groups_mutex_);
  groups_.push_back(&group);
}

void World::remove(ProgramGroup& group, std::int64_t deadline) {
  {
    const std::lock_guard lock(groups_mutex_);
    std::erase(groups_, &group);
    if (!groups_.empty()) return;
  }
  const char* wanted = std::getenv("SHOAL_SUMMARY");
  if (same_numbers_ && wanted != nullptr && std::string_view(wanted) == "1")
    report_summary(context_->totals(), static_cast<double>(now_ns() - begun_) * 1e-9);
  context_->close(deadline);
  if (trace_ != nullptr) trace_->close();
  stop_notifier();
  membership_.release(static_cast<double>(std::max<std::int64_t>(deadline - now_ns(), 0)) * 1e-9);
  {
    const std::lock_guard lock(groups_mutex_);
    is_released_ = true;
  }
  released_.notify_all();
}

// The process exits with open groups: first tell all peers, who may wait for each other, then close.
void World::close_groups() {
  std::vector<std::shared_ptr<ProgramGroup>> open;
  {
    const std::lock_guard lock(groups_mutex_);
    for (ProgramGroup* group :
         groups_)  // null: a callback thread has released its last handle, and closes it
      if (auto alive = group->weak_from_this().lock()) open.push_back(std::move(alive));
  }
  context_->program_ends();
  for (const auto& group : open) group->begin_close();
  for (const auto& group : open) {
    try {
      group->close(kExitTimeout);
    } catch (const Failure&) {  // there is nobody left to catch it
    }
  }
  std::unique_lock lock(groups_mutex_);
  released_.wait_for(lock, std::chrono::duration<double>(kExitTimeout), [this] { return is_released_; });
}

void World::at_exit() {
  std::vector<std::shared_ptr<World>> worlds;
  {
    const std::lock_guard lock(registry().mutex);
    for (const auto& world : registry().worlds)
      if (auto alive = world.lock()) worlds.push_back(std::move(alive));
  }
  for (const auto& world : worlds)
    if (!world->forked()) world->close_groups();
}

// -- forks ----------------------------------------------------------------------------------------

void World::become_forked() {
  forked_ = true;
  context_->disown();
  membership_.disown();
  if (trace_ != nullptr) trace_.release()->disown();
  if (notifier_.joinable()) notifier_.detach();  // the child has no such thread
}

void World::after_fork_in_child() {
  // Other threads of the parent may have held the locks; the child has one thread.
  for (const auto& world : registry().worlds)
    if (const auto alive = world.lock()) alive->become_forked();
  forget_callback_threads();
}

}  // namespace shoal::frontend_core
