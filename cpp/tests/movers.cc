// Failures of a mover, between two ranks.

#include <barrier>
#include <memory>
#include <thread>
#include <vector>

#include "tests/calls.h"
#include "tests/world.h"

namespace shoal::stress {
namespace {

void fail_once(const World& world, std::uint64_t ident, FakeMpi::Failure failure, Watchdog& watchdog,
               Tally& tally) {
  std::barrier both(2);
  run_ranks(2, [&](int rank) {
    Desk& desk = watchdog.desk(rank);
    auto group = world.make_group(rank, ident, {0, 1}, 1, Scope::kAll, true);
    world.mpi().connect(*group);
    Plan plan;
    plan.kind = Kind::kAllReduce;
    plan.how = {DType::kFloat32, RedOp::kSum, 2};
    plan.count = ident % 4 < 2 ? 1000 : 10'000;  // reduced in one step or in two
    const Taste taste{};
    check(Call(group, plan, taste, 0, desk, tally).finish(), "the first operation fails");
    both.arrive_and_wait();
    if (rank == 0) world.mpi().fail_next(failure);
    auto call = std::make_unique<Call>(group, plan, taste, 1, desk, tally);
    // Where it was complete before the other rank failed, the next operation fails.
    if (call->finish()) {
      call = std::make_unique<Call>(group, plan, taste, 2, desk, tally);
      check(!call->finish(), "an operation of a group whose mover has failed succeeds");
    }
    const Error& error = call->operation().error();
    check(error.code == ErrorCode::kAborted && error.text.find("the double fails there") != error.text.npos,
          "the failure of a mover is reported as " + error.text);
    group->close(now_ns() + kSecond);
  });
}

}  // namespace

void failing_movers(Watchdog& watchdog) {
  const World world(std::vector<int>{0, 0});
  Tally tally;
  // The groups pass parts by messages or collectives.
  for (std::uint64_t ident = 1; ident <= 16; ++ident)
    fail_once(world, ident, ident % 2 ? FakeMpi::Failure::kAtStart : FakeMpi::Failure::kLater, watchdog,
              tally);
  for (int rank = 0; rank < 2; ++rank) world.at(rank).close(now_ns() + kSecond);
}

}  // namespace shoal::stress
