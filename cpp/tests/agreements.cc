// Agreements over links, each rank in a separate thread.  In some rounds one rank leaves between two
// agreements, or is cut off from all others.

#include "engine/agreements.h"

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "engine/group.h"
#include "tests/scenes.h"
#include "tests/support.h"
#include "tests/world.h"

namespace shoal::stress {
namespace {

constexpr int kAgreements = 6;

using Decisions = std::vector<consensus::Decision>;

// The rank that goes, after how many agreements, and how.
struct Fate {
  int rank;
  int after;
  bool leaves;  // otherwise it is cut off
};

void take_part(Context& context, Group& group, Random random, const Fate& fate, Decisions& decisions) {
  const bool goes = fate.rank == group.rank();
  for (int i = 0; i < kAgreements; ++i) {
    if (chance(random, 2)) std::this_thread::sleep_for(std::chrono::microseconds(pick(random, 1, 2000)));
    if (goes && i == fate.after) {
      for (int other = 0; other < group.size() && !fate.leaves; ++other)
        if (other != group.rank()) context.peers().disconnect(other);
      break;
    }
    const std::string vote(static_cast<std::size_t>(group.rank()) * 100, 'x');
    const auto number = group.agreements().begin({consensus::Op::kGather, vote}, 30 * kSecond);
    const auto news = group.agreements().wait(number.value(), now_ns() + 30 * kSecond);
    check(news.outcome == consensus::Outcome::kDecided, "no decision");
    decisions.push_back(*news.decision);
  }
  if (goes) group.close(now_ns() + kSecond);
}

}  // namespace

void agree_over_links(std::uint64_t seed) {
  Random random(seed);
  World world(random);
  std::vector<int> all;
  for (int rank = 0; rank < world.size(); ++rank) all.push_back(rank);
  const Fate fate{pick(random, -1, world.size() - 1), pick(random, 0, kAgreements - 1),
                  world.size() == 2 || chance(random, 2)};
  std::vector<std::shared_ptr<Group>> groups;
  for (int rank : all) groups.push_back(world.make_group(rank, seed + 1, all, 1));
  if (chance(random, 2)) groups[0]->abort("broken for the test");
  std::vector<Decisions> decisions(all.size());
  const std::uint64_t base = random();
  run_ranks(world.size(), [&](int rank) {
    take_part(world.at(rank), *groups[rank], Random(base + static_cast<std::uint64_t>(rank)), fate,
              decisions[rank]);
  });
  for (int rank : all) {
    for (std::size_t i = 0; i < decisions[rank].size(); ++i) {
      const auto& decision = decisions[rank][i];
      const bool gone = fate.rank >= 0 && static_cast<int>(i) >= fate.after;
      check(decision == decisions[fate.rank == 0 ? 1 : 0][i], "two members decide differently");
      check(decision.ranks.count() == world.size() - gone && !(gone && decision.ranks.has(fate.rank)),
            "a decision does not have the ranks that continue");
    }
  }
  for (int rank : all) groups[rank]->close(now_ns() + kSecond);
  groups.clear();
  for (int rank : all) world.at(rank).close(now_ns() + kSecond);
}

}  // namespace shoal::stress
