#include "engine/quarantine.h"

#include <algorithm>
#include <utility>

namespace shoal {

void Quarantine::open(std::uint64_t group, std::vector<int> others) {
  std::lock_guard lock(mutex_);
  std::erase_if(others, [&](int peer) { return std::ranges::binary_search(ended_, peer); });
  if (!others.empty()) entries_[group].others = std::move(others);
}

void Quarantine::hold(std::uint64_t group, const void* address) {
  std::lock_guard lock(mutex_);
  if (auto found = entries_.find(group); found != entries_.end())
    if (auto offset = arena_->hold(address)) found->second.held.push_back(*offset);
}

void Quarantine::left(std::uint64_t group, int peer) {
  std::lock_guard lock(mutex_);
  if (auto found = entries_.find(group); found != entries_.end()) strike_out(found, peer);
}

void Quarantine::ended(int peer) {
  std::lock_guard lock(mutex_);
  if (!std::ranges::binary_search(ended_, peer)) ended_.insert(std::ranges::lower_bound(ended_, peer), peer);
  for (auto entry = entries_.begin(); entry != entries_.end();) entry = strike_out(entry, peer);
}

Quarantine::Entries::iterator Quarantine::strike_out(Entries::iterator entry, int peer) {
  std::erase(entry->second.others, peer);
  if (!entry->second.others.empty()) return std::next(entry);
  for (std::uint64_t offset : entry->second.held) arena_->unhold(offset);
  return entries_.erase(entry);
}

}  // namespace shoal
