// Agreements over links: groups of contexts, of which some are severed.

#include "engine/agreements.h"

#include <algorithm>
#include <string>
#include <vector>

#include "engine/group.h"
#include "tests/scenes.h"
#include "tests/support.h"
#include "tests/world.h"

namespace shoal::stress {

void agree_over_links(std::uint64_t seed) {
  Random random(seed);
  World world(random);
  std::vector<int> all;
  for (int rank = 0; rank < world.size(); ++rank) all.push_back(rank);
  std::vector<std::shared_ptr<Group>> groups;
  for (int rank : all) groups.push_back(world.make_group(rank, seed + 1, all, 1));
  const bool broken = chance(random, 2);
  if (broken) groups[0]->fail({ErrorCode::kAborted, "broken for the test", {0}}, true);
  for (int round = 0; round < 3; ++round) {
    std::vector<int> order = all;
    std::shuffle(order.begin(), order.end(), random);
    std::vector<std::optional<std::uint64_t>> numbers(all.size());
    for (int rank : order)
      numbers[static_cast<std::size_t>(rank)] = groups[static_cast<std::size_t>(rank)]->agreements().begin(
          {agreement::Op::kGather, std::string(static_cast<std::size_t>(rank) * 100, 'x')}, 30 * kSecond);
    std::optional<agreement::Decision> first;
    for (int rank : all) {
      Agreements& own = groups[static_cast<std::size_t>(rank)]->agreements();
      const auto [outcome, decision, request, closed] =
          own.wait(numbers[static_cast<std::size_t>(rank)].value(), now_ns() + 30 * kSecond);
      check(outcome == agreement::Outcome::kDecided, "no decision");
      if (!first) first = decision;
      check(*decision == *first, "two members decide differently");
      check(decision->ranks.count() == world.size(), "a member is left out");
    }
  }
  for (int rank : all) groups[static_cast<std::size_t>(rank)]->close(now_ns() + kSecond);
  groups.clear();
  for (int rank : all) world.at(rank).close(now_ns() + kSecond);
}

}  // namespace shoal::stress
