// Shared memory of failed groups, which members on this host may still access.
//
// Such a range is reused only when every other member on the host has closed the group, after which it does
// not access the memory, or its process has ended.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "shm/arena.h"

namespace shoal {

class Quarantine {
 public:
  explicit Quarantine(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  // Registers a group; `others` are the global ranks of its other members on this host.
  void open(std::uint64_t group, std::vector<int> others);
  // Holds the range that contains `address`, if members of the group may still access it.
  void hold(std::uint64_t group, const void* address);
  // A member has closed the group.
  void left(std::uint64_t group, int peer);
  // A peer's process has ended, and its memory is unmapped.
  void ended(int peer);

 private:
  struct Entry {
    std::vector<int> others;  // members that may still access the held ranges
    std::vector<std::uint64_t> held;
  };
  using Entries = std::map<std::uint64_t, Entry>;
  Entries::iterator strike_out(Entries::iterator entry, int peer);  // requires the lock

  std::shared_ptr<Arena> arena_;
  std::mutex mutex_;
  Entries entries_;         // groups with such members
  std::vector<int> ended_;  // ascending
};

}  // namespace shoal
