// The check that all ranks have equal arguments: src/shoal/parallel/consistency.py, with the same messages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "shoal/abi.h"
#include "shoal/error.h"
#include "shoal/group.h"

namespace shoal {
inline namespace frontend {
namespace detail {

// Pairs of a unique name and a text to compare.
using Items = std::vector<std::pair<std::string, std::string>>;

inline std::string joined(const std::vector<std::string>& parts, const std::string& separator) {
  std::string text;
  for (const std::string& part : parts) text += (&part == &parts.front() ? "" : separator) + part;
  return text;
}

inline std::vector<std::string> differences(const Items& expected, const Items& given) {
  const std::map<std::string, std::string> theirs(expected.begin(), expected.end());
  const std::map<std::string, std::string> mine(given.begin(), given.end());
  std::vector<std::string> lines;
  for (const auto& [name, value] : expected)
    if (const auto found = mine.find(name); found != mine.end() && found->second != value)
      lines.push_back(name + " is " + found->second + ", but " + value + " on rank 0");
  for (const auto& [name, value] : expected)
    if (mine.count(name) == 0) lines.push_back(name + " is missing, " + value + " on rank 0");
  for (const auto& [name, value] : given)
    if (theirs.count(name) == 0) lines.push_back(name + " (" + value + ") does not exist on rank 0");
  for (std::size_t i = 0; lines.empty() && i < given.size(); ++i)
    if (given[i].first != expected[i].first)
      lines.push_back(given[i].first + " is registered where rank 0 has " + expected[i].first);
  return lines;
}

// The texts of all ranks.
inline std::vector<std::string> exchange_texts(const Group& group, const std::string& own) {
  std::vector<std::int64_t> length{static_cast<std::int64_t>(own.size())};
  std::vector<Array<std::uint8_t>> parts;
  std::vector<std::vector<std::uint8_t>> memory;
  for (const Array<std::int64_t>& other : group.all_gather(Array<std::int64_t>(length)).wait())
    memory.emplace_back(static_cast<std::size_t>(other[0]));
  for (std::vector<std::uint8_t>& bytes : memory) parts.emplace_back(bytes);
  std::vector<std::uint8_t> bytes(own.begin(), own.end());
  group.all_gather(parts, Array<std::uint8_t>(bytes)).wait();
  std::vector<std::string> texts;
  for (const std::vector<std::uint8_t>& text : memory) texts.emplace_back(text.begin(), text.end());
  return texts;
}

// Throws ModelMismatch on every rank unless `items` are equal on all ranks, in the same order.  Collective.
// what: the continuation of "the ranks ..." in the message.
inline void check_same(const Group& group, const std::string& what, const Items& items) {
  constexpr std::size_t kMostShown = 5;  // differences of one rank
  std::string own;
  for (const auto& [name, text] : items) {
    own.append(name).push_back('\0');
    own.append(text).push_back('\0');
  }
  std::vector<std::uint8_t> digest(32);
  shoal_digest(own.data(), own.size(), digest.data());
  const auto digests = group.all_gather(Array<std::uint8_t>(digest)).wait();
  if (std::all_of(digests.begin(), digests.end(), [&](const Array<std::uint8_t>& other) {
        return std::equal(other.begin(), other.end(), digest.begin());
      }))
    return;
  std::vector<Items> descriptions;
  for (const std::string& text : exchange_texts(group, own)) {
    Items& description = descriptions.emplace_back();
    const auto part = [&](std::size_t& from) {
      const std::size_t end = std::min(text.find('\0', from), text.size());
      const std::string found = text.substr(from, end - from);
      from = end + 1;
      return found;
    };
    for (std::size_t from = 0; from < text.size();) {
      std::string name = part(from);
      std::string value = from < text.size() ? part(from) : std::string();
      description.emplace_back(std::move(name), std::move(value));
    }
  }
  std::string lines;
  for (std::size_t rank = 0; rank < descriptions.size(); ++rank) {
    const std::vector<std::string> found = differences(descriptions[0], descriptions[rank]);
    const std::string prefix = "\n  rank " + std::to_string(rank) + ": ";
    for (std::size_t i = 0; i < std::min(found.size(), kMostShown); ++i) lines += prefix + found[i];
    if (found.size() > kMostShown)
      lines += prefix + "and " + std::to_string(found.size() - kMostShown) + " more differences";
  }
  throw ModelMismatch("the ranks " + what + " (seen by rank " + std::to_string(group.rank()) +
                      "); build the same one everywhere:" + lines);
}

}  // namespace detail
}  // namespace frontend
}  // namespace shoal
