// A scenario of an agreement that random rounds rarely produce.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "consensus/agreement.h"
#include "tests/scenes.h"
#include "tests/support.h"

namespace shoal::stress {
namespace {

using namespace shoal::consensus;

constexpr int kSize = 5;
constexpr std::int64_t kVoteTimeout = 500, kEnd = 100000;

struct Group {
  Group() {
    for (int rank = 0; rank < kSize; ++rank)
      members.emplace_back(Settings{rank, kSize, kVoteTimeout, 100, 40});
  }

  Agreement& member(int rank) { return members[rank]; }

  // Everything arrives except messages from 1 to 4.
  void deliver(std::int64_t now) {
    for (int from = 0, idle = 0; idle < kSize; from = (from + 1) % kSize) {
      const auto broadcasts = member(from).take_messages();
      idle = broadcasts.empty() ? idle + 1 : 0;
      for (const Broadcast& broadcast : broadcasts)
        for (int to : broadcast.to)
          from == 1 && to == 4 ? late.push_back(broadcast.message)
                               : member(to).receive(from, *broadcast.message, now);
    }
  }

  std::vector<Agreement> members;
  std::vector<std::shared_ptr<const Message>> late;
};

}  // namespace

// 1, 2 and 3 have lost 0, decide, and die.  4, which has accepted the proposal of 0, receives their decision
// after 0 has learned of their deaths.
void late_words_of_the_dead() {
  Group group;
  for (int rank : {1, 2, 3}) {
    group.member(0).lose(rank, false, 0);
    group.member(rank).lose(0, false, 0);
  }
  for (int rank = 0; rank < kSize; ++rank) group.member(rank).vote({Op::kSum, std::string(8, '\1')}, kEnd, 1);
  group.deliver(1);
  group.member(1).tick(1 + kVoteTimeout);  // the vote of 4 does not arrive
  group.deliver(2 + kVoteTimeout);
  check(group.member(1).decision().has_value(), "a majority does not decide");
  check(!group.member(0).decision(), "a minority decides");
  for (int rank : {1, 2, 3}) group.member(0).lose(rank, true, 3 + kVoteTimeout);
  const bool early = group.member(0).decision().has_value();  // 4 cannot know yet that they are dead
  if (!early) group.deliver(4 + kVoteTimeout);
  for (const auto& message : std::exchange(group.late, {}))
    group.member(4).receive(1, *message, 5 + kVoteTimeout);
  group.deliver(6 + kVoteTimeout);
  const auto &zero = group.member(0).decision(), &four = group.member(4).decision();
  check(zero && four && *zero == *four, "two surviving members decide differently");
}

}  // namespace shoal::stress
