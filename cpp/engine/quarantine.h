// Shared memory of groups that failed, to which members on this host may still write or where they look.
//
// Such a range is not handed out again until every other member on the host has closed the group, after which
// it touches nothing of it, or its process has ended.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "memory/arena.h"

namespace shoal {

class Quarantine {
 public:
  explicit Quarantine(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  // A group begins here; `others` are its members on this host but for this rank, by global rank.
  void open(std::uint64_t group, std::vector<int> others);
  // The range around this address is kept back, if members of the group may still touch it.
  void hold(std::uint64_t group, const void* address);
  // A member has closed the group.
  void left(std::uint64_t group, int peer);
  // The process of a peer has ended, and its memory is unmapped.
  void ended(int peer);

 private:
  struct Entry {
    std::vector<int> others;  // that may still touch what is held
    std::vector<std::uint64_t> held;
  };
  using Entries = std::map<std::uint64_t, Entry>;
  Entries::iterator strike_out(Entries::iterator entry, int peer);  // under the lock

  std::shared_ptr<Arena> arena_;
  std::mutex mutex_;
  Entries entries_;         // of groups that have such members
  std::vector<int> ended_;  // ascending
};

}  // namespace shoal
