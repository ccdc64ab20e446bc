#include "consensus/decision.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "common/bytes.h"

namespace shoal::consensus {
namespace {

constexpr std::size_t kInteger = 8;

std::uint64_t integer(const std::string& value, std::size_t index = 0) {
  std::uint64_t result;
  std::memcpy(&result, value.data() + index * kInteger, kInteger);
  return result;
}

std::string bytes_of(const std::vector<std::uint64_t>& integers) {
  return std::string(reinterpret_cast<const char*>(integers.data()), integers.size() * kInteger);
}

std::vector<std::uint64_t> integers(const std::string& value) {
  std::vector<std::uint64_t> result(value.size() / kInteger);
  for (std::size_t i = 0; i < result.size(); ++i) result[i] = integer(value, i);
  return result;
}

std::uint64_t reduce(Op op, std::uint64_t a, std::uint64_t b) {
  const bool less = static_cast<std::int64_t>(a) < static_cast<std::int64_t>(b);
  switch (op) {
    case Op::kAnd:
    case Op::kGrow:
      return a & b;
    case Op::kOr:
      return a | b;
    case Op::kMin:
      return less ? a : b;
    case Op::kMax:
      return less ? b : a;
    default:
      return a + b;
  }
}

std::string add(Op op, const std::string& so_far, const std::string& vote) {
  if (op != Op::kCommon) return bytes_of({reduce(op, integer(so_far), integer(vote))});
  const auto a = integers(so_far), b = integers(vote);
  std::vector<std::uint64_t> common;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(common));
  return bytes_of(common);
}

const char* flaw_of_value(Op op, const std::string& value, std::size_t limit) {
  if (value.size() > limit) return "a value is longer than votes may be";
  if (gathers(op)) return nullptr;
  if (op != Op::kCommon) return value.size() == kInteger ? nullptr : "a value is not one integer";
  if (value.size() % kInteger != 0) return "a value is not a list of integers";
  const auto list = integers(value);
  const bool ascending = std::adjacent_find(list.begin(), list.end(), std::greater_equal<>()) == list.end();
  return ascending ? nullptr : "a list of integers is not ascending";
}

const char* flaw_of_gathered(const std::string& value, int ranks, std::size_t limit) {
  ByteReader reader(value);
  for (int i = 0; i < ranks; ++i) {
    const auto length = reader.get<std::uint32_t>();
    if (length > limit) return "a gathered vote is longer than votes may be";
    reader.text(length);
  }
  if (!reader.well()) return "a gathered value ends early";
  return reader.ended() ? nullptr : "a gathered value has more votes than ranks";
}

bool is_op(Op op) { return op >= Op::kAnd && op <= Op::kGrow; }

const char* flaw_of_ops(const std::string& value, int ranks) {
  if (value.size() != static_cast<std::size_t>(ranks))
    return "a decision has another number of ops than ranks";
  const bool known = std::ranges::all_of(value, [](char op) { return is_op(static_cast<Op>(op)); });
  return known ? nullptr : "a decision lists an unknown op";
}

}  // namespace

Decision combine(int size, const std::vector<std::pair<int, const Vote*>>& votes) {
  Decision result;
  result.ranks = RankSet(size);
  for (const auto& [rank, vote] : votes) result.ranks.add(rank);
  const Op op = votes.front().second->op;
  if (std::ranges::any_of(votes, [&](const auto& entry) { return entry.second->op != op; })) {
    for (const auto& [rank, vote] : votes) result.value += static_cast<char>(vote->op);
    return result;
  }
  result.op = op;
  if (gathers(op)) {
    for (const auto& [rank, vote] : votes) {
      put(result.value, static_cast<std::uint32_t>(vote->value.size()));
      result.value += vote->value;
    }
    return result;
  }
  result.value = votes.front().second->value;
  for (std::size_t i = 1; i < votes.size(); ++i) result.value = add(op, result.value, votes[i].second->value);
  return result;
}

const char* invalid_reason(const Vote& vote, int size) {
  if (!is_op(vote.op)) return "a vote has an unknown op";
  return flaw_of_value(vote.op, vote.value, vote_limit(size));
}

const char* invalid_reason(const Decision& decision, int size) {
  if (!decision.ranks.any()) return "a decision has no ranks";
  if (decision.op == Op::kDiffers) return flaw_of_ops(decision.value, decision.ranks.count());
  if (!is_op(decision.op)) return "a decision has an unknown op";
  if (gathers(decision.op)) return flaw_of_gathered(decision.value, decision.ranks.count(), vote_limit(size));
  return flaw_of_value(decision.op, decision.value, vote_limit(size));
}

}  // namespace shoal::consensus
