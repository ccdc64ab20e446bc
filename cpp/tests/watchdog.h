// Detects that there is no progress, and reports the state of all ranks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/group.h"

namespace shoal::stress {

constexpr int kMostRanks = 8;

// One rank records its current activity here, for the report.
class Desk {
 public:
  explicit Desk(std::atomic<std::uint64_t>& beats) : beats_(beats) {}
  void doing(const char* what, const Group* group = nullptr);
  void begun(const OperationPtr& operation);
  void ended(const OperationPtr& operation);
  void clear();
  void print(int rank);

 private:
  std::atomic<std::uint64_t>& beats_;
  std::mutex mutex_;
  const char* what_ = nullptr;
  std::uint64_t group_ = 0;
  std::vector<OperationPtr> under_way_;
};

class Watchdog {
 public:
  // After `patience` seconds without a new activity of any rank or a new round, it prints the desks and all
  // stacks, and aborts.
  explicit Watchdog(int patience);
  ~Watchdog();
  Desk& desk(int rank) { return desks_[rank]; }
  void begin_round(std::uint64_t seed);

 private:
  void watch();
  [[noreturn]] void bark();

  int patience_;
  std::atomic<std::uint64_t> beats_{0};
  std::array<Desk, kMostRanks> desks_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace shoal::stress
