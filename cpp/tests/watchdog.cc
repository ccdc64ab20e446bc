#include "tests/watchdog.h"

#include <dirent.h>
#include <execinfo.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>

#include "engine/describe.h"
#include "tests/support.h"

namespace shoal::stress {
namespace {

std::atomic<std::uint64_t> current_seed{0};
std::atomic<int> stacks_due{0};

void print_stack(int) {
  void* frames[64];
  backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
  stacks_due.fetch_sub(1);
}

std::string line_of(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The core's threads block all signals: only their name and the system call they sleep in are printed.
bool blocks_signals(const std::string& task) {
  std::ifstream file(task + "/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("SigBlk:")) return line.find_last_not_of("0") > line.find('\t');
  return true;
}

void print_stacks() {
  struct sigaction action{};
  action.sa_handler = print_stack;
  sigaction(SIGUSR2, &action, nullptr);
  DIR* tasks = opendir("/proc/self/task");
  if (tasks == nullptr) return;
  while (dirent* entry = readdir(tasks)) {
    const int id = std::atoi(entry->d_name);
    if (id == 0 || id == static_cast<int>(syscall(SYS_gettid))) continue;
    const std::string task = "/proc/self/task/" + std::string(entry->d_name);
    std::fprintf(stderr, "\nthread %d (%s) in %s\n", id, line_of(task + "/comm").c_str(),
                 line_of(task + "/wchan").c_str());
    if (blocks_signals(task)) continue;
    stacks_due = 1;
    syscall(SYS_tgkill, getpid(), id, SIGUSR2);
    for (int i = 0; i < 1000 && stacks_due > 0; ++i) usleep(1000);
  }
  closedir(tasks);
  std::fprintf(stderr, "\n(addr2line -Cipfe PROGRAM ADDRESS names the lines)\n");
}

[[noreturn]] void uncaught() {
  std::string what = "an uncaught exception";
  try {
    if (auto error = std::current_exception()) std::rethrow_exception(error);
  } catch (const std::exception& error) {
    what += std::string(": ") + error.what();
  } catch (...) {
  }
  print_stack(0);
  die(what);
}

void print_lane(const Operation& operation) {
  Group& group = operation.group();
  const Request& request = operation.request();
  if (!request.numbered() || group.team() == nullptr) return;
  const HostLane& lane = group.team()->lane(request.channel);
  std::fprintf(stderr, ", in phase %llu of its lane", static_cast<unsigned long long>(lane.phase));
  for (std::size_t place = 0; place < lane.member_lanes.size(); ++place) {
    const Counters* counters = lane.member_lanes[place].counters;
    if (counters == nullptr) {
      std::fprintf(stderr, "\n      member %zu not found", place);
      continue;
    }
    std::fprintf(stderr, "\n      member %zu: staged %llx reduced %llx taken %llx published", place,
                 static_cast<unsigned long long>(counters->staged.load()),
                 static_cast<unsigned long long>(counters->reduced.load()),
                 static_cast<unsigned long long>(counters->taken.load()));
    for (std::uint64_t parity : {0, 1})
      std::fprintf(stderr, " %llu",
                   static_cast<unsigned long long>(lane.member_lanes[place].slot(parity).phase.load()));
  }
}

}  // namespace

void die(const std::string& what) {
  std::fprintf(stderr, "stress: in the round of --seed %llu: %s\n",
               static_cast<unsigned long long>(current_seed.load()), what.c_str());
  std::fflush(stderr);
  std::abort();
}

void Desk::doing(const char* what, const Group* group) {
  std::lock_guard lock(mutex_);
  what_ = what;
  group_ = group != nullptr ? group->ident() : 0;
  beats_.fetch_add(1, std::memory_order_relaxed);
}

void Desk::begun(const OperationPtr& operation) {
  std::lock_guard lock(mutex_);
  under_way_.push_back(operation);
}

void Desk::ended(const OperationPtr& operation) {
  std::lock_guard lock(mutex_);
  std::erase(under_way_, operation);
  beats_.fetch_add(1, std::memory_order_relaxed);
}

void Desk::clear() {
  std::lock_guard lock(mutex_);
  what_ = nullptr;
  group_ = 0;
  under_way_.clear();
}

void Desk::print(int rank) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (what_ == nullptr) return;
  std::fprintf(stderr, "\nrank %d is at: %s", rank, what_);
  if (group_ != 0) std::fprintf(stderr, " of group %llu", static_cast<unsigned long long>(group_));
  std::fputc('\n', stderr);
  for (const auto& operation : under_way_) {
    Group& group = operation->group();
    std::fprintf(stderr, "  under way: %s, rank %d of %d of %s%s%s%s", describe(operation->request()).c_str(),
                 group.rank(), group.size(), group.name().c_str(), group.broken() ? " (broken)" : "",
                 group.closed() ? " (closed)" : "", operation->done() ? ", done" : "");
    print_lane(*operation);
    std::fputc('\n', stderr);
  }
}

Watchdog::Watchdog(int patience)
    : patience_(patience),
      desks_{Desk(beats_), Desk(beats_), Desk(beats_), Desk(beats_),
             Desk(beats_), Desk(beats_), Desk(beats_), Desk(beats_)},
      thread_([this] { watch(); }) {
  std::set_terminate(uncaught);
}

Watchdog::~Watchdog() {
  stop_ = true;
  thread_.join();
}

void Watchdog::begin_round(std::uint64_t seed) {
  current_seed = seed;
  beats_.fetch_add(1, std::memory_order_relaxed);
  for (Desk& desk : desks_) desk.clear();
}

void Watchdog::watch() {
  constexpr int kLooks = 20;  // checks per second
  std::uint64_t seen = 0;
  for (int quiet = 0; !stop_; ++quiet) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1000 / kLooks));
    std::uint64_t beats = beats_.load(std::memory_order_relaxed);
    if (beats != seen) quiet = 0;
    seen = beats;
    if (quiet > patience_ * kLooks) bark();
  }
}

void Watchdog::bark() {
  for (int rank = 0; rank < kMostRanks; ++rank) desk(rank).print(rank);
  print_stacks();
  die("nothing was finished for " + std::to_string(patience_) + " s");
}

}  // namespace shoal::stress
