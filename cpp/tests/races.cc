// A short life: races between a few operations of a new world.
//
// Every rank runs the same random list of operations: collectives of random kinds and sizes, waited for out
// of order or completed by the progress thread, messages, operations matched by key from a second thread, in
// several groups at once.  Some rounds end with an abort or a cut connection instead of a close.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/calls.h"
#include "tests/world.h"

namespace shoal::stress {
namespace {

OperationPtr message(Group& group, Kind kind, int peer, std::uint64_t tag, std::vector<std::int32_t>* data) {
  std::optional<Span> span;
  if (data != nullptr) span = {reinterpret_cast<std::byte*>(data->data()), data->size() * 4};
  return group.submit(message_request(kind, peer, tag, DType::kInt32, span));
}

// -- one rank -------------------------------------------------------------------------------------

enum class End { kClose, kAbort, kCut };

struct Round {
  World& world;
  Watchdog& watchdog;
  Tally& tally;
  std::uint64_t seed;
  int lanes;
  int steps;
  End end;
  int culprit;  // the rank that aborts or loses its connections
};

class Rank {
 public:
  Rank(Round& round, int rank)
      : round_(round),
        rank_(rank),
        script_(round.seed),
        own_(round.seed * 1009 + static_cast<std::uint64_t>(rank)) {}

  void run() {
    make_groups();
    std::thread side([this, seed = own_()] { keyed(Random(seed)); });
    const int stop =
        round_.end == End::kClose || rank_ != round_.culprit ? -1 : pick(own_, 0, round_.steps - 1);
    bool good = true;
    for (int step = 0; good && step < round_.steps; ++step) {
      if (step == stop) disturb();
      good = pick(script_, 0, 4) == 0 ? messages() : burst();
    }
    side.join();
    check(round_.end != End::kClose || (good && !side_failed_), "an operation failed: " + why());
    desk().doing("closing");
    for (auto& group : groups_) group->close(now_ns() + (good ? 20 : 2) * kSecond);
    for (auto& group : groups_)
      if (auto error = group->failure())  // all ranks follow the protocol and make the same calls
        check(error->code != ErrorCode::kWire && error->code != ErrorCode::kMismatch,
              group->name() + " on rank " + std::to_string(rank_) + ": " + error->text);
    context().close(now_ns() + 2 * kSecond);
    groups_.clear();
    desk().doing("having finished");
  }

 private:
  Context& context() { return round_.world.at(rank_); }
  Desk& desk() { return round_.watchdog.desk(rank_); }

  void make_groups() {
    // A group of all ranks, groups of even and odd ranks, and pairs of neighbours.
    auto add = [&](std::uint64_t ident, auto&& member) {
      std::vector<int> members;
      for (int r = 0; r < round_.world.size(); ++r)
        if (member(r)) members.push_back(r);
      dawdle(own_);
      groups_.push_back(round_.world.make_group(rank_, ident, members, round_.lanes));
      if (groups_.back()->rank() == 0) ++round_.tally.groups;
      numbers_.push_back(0);
    };
    add(1, [](int) { return true; });
    add(10 + static_cast<std::uint64_t>(rank_ % 2), [&](int r) { return r % 2 == rank_ % 2; });
    add(100 + static_cast<std::uint64_t>(rank_ / 2), [&](int r) { return r / 2 == rank_ / 2; });
  }

  std::unique_ptr<Call> call(std::size_t which, Plan plan, Taste taste, std::uint64_t channel) {
    return std::make_unique<Call>(groups_[which], plan, taste, channel, desk(), round_.tally);
  }

  // Several collectives in flight, waited for in any order, some completed by the progress thread.
  bool burst() {
    std::vector<std::unique_ptr<Call>> calls;
    const int count = pick(script_, 1, 6);
    for (int i = 0; i < count; ++i) {
      std::size_t which = static_cast<std::size_t>(pick(script_, 0, 2));
      Random script(script_());  // groups differ in size, so their plans use different random numbers
      Plan plan = make_plan(script, groups_[which]->size(), Extent::kMixed);
      dawdle(own_);
      calls.push_back(call(which, plan, make_taste(own_), numbers_[which]++));
    }
    if (pick(own_, 0, 3) == 0)
      for (int i = 0; i < 200 && !calls.back()->operation().done(); ++i)
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    std::shuffle(calls.begin(), calls.end(), own_);
    bool good = true;
    for (auto& call : calls) {
      dawdle(own_);
      good &= call->finish();
    }
    return good;
  }

  // Every rank sends to the next rank, with and without a receive buffer, from a given rank or from any.
  bool messages() {
    Group& group = *groups_[0];
    const std::uint64_t tag = script_() % 1000;
    const std::size_t count =
        static_cast<std::size_t>(pick(script_, 0, 3) == 0 ? 100'000 : pick(script_, 0, 5000));
    const int from = (rank_ + group.size() - 1) % group.size();
    std::vector<std::int32_t> out(count, rank_), in(count, -1);
    const bool first = pick(own_, 0, 1), buffer = pick(own_, 0, 1), anybody = pick(own_, 0, 1);
    OperationPtr receive, send;
    auto take = [&] {
      receive = message(group, Kind::kRecv, anybody ? -1 : from, tag, buffer ? &in : nullptr);
    };
    if (first) take();
    dawdle(own_);
    send = message(group, Kind::kSend, (rank_ + 1) % group.size(), tag, &out);
    dawdle(own_);
    if (!first) take();
    bool good = true;
    for (const auto& op : {receive, send}) {
      desk().doing("waiting for a message", &group);
      desk().begun(op);
      check(context().wait(*op, now_ns() + 2 * kPatience), "a message hangs");
      good &= op->error().code == ErrorCode::kNone;
      desk().ended(op);
    }
    if (!good) return false;
    const auto& arrived = *receive->received;
    check(arrived.header.source == static_cast<std::uint32_t>(from), "a message came from another rank");
    check(arrived.header.total == count * 4, "a message has another length");
    if (!buffer) std::memcpy(in.data(), arrived.owned.get(), count * 4);
    check(std::all_of(in.begin(), in.end(), [&](std::int32_t v) { return v == from; }), "a message is wrong");
    return call(0, barrier(), Taste{}, numbers_[0]++)->finish();  // the tag is free again
  }

  // A second thread of the rank: operations matched by key, in a different order.
  void keyed(Random own) {
    Random random(round_.seed + 77);
    std::vector<std::pair<std::uint64_t, Plan>> plans;
    for (int i = 0; i < round_.steps; ++i) {
      Random script(random());
      plans.emplace_back(kKeyed | (random() >> 4), make_plan(script, groups_[0]->size(), Extent::kMixed));
    }
    for (std::size_t begin = 0; begin < plans.size(); begin += 4) {
      std::size_t end = std::min(begin + 4, plans.size());
      std::shuffle(plans.begin() + static_cast<std::ptrdiff_t>(begin),
                   plans.begin() + static_cast<std::ptrdiff_t>(end), own);
      std::vector<std::unique_ptr<Call>> calls;
      for (std::size_t i = begin; i < end; ++i) {
        dawdle(own);
        calls.push_back(call(0, plans[i].second, make_taste(own), plans[i].first));
      }
      for (auto& call : calls)
        if (!call->finish()) side_failed_ = true;
      if (side_failed_) return;
    }
  }

  void disturb() {
    if (round_.end == End::kAbort) {
      ++round_.tally.aborts;
      for (auto& group : groups_) group->abort("the stress test aborts");
    } else {
      for (int r = 0; r < round_.world.size(); ++r)
        if (r != rank_) context().peers().disconnect(r);
    }
  }

  std::string why() {
    for (auto& group : groups_)
      if (auto error = group->failure())
        return group->name() + " on rank " + std::to_string(rank_) + ": " + error->text;
    return "no group is broken";
  }

  Round& round_;
  int rank_;
  Random script_, own_;
  std::vector<std::shared_ptr<Group>> groups_;
  std::vector<std::uint64_t> numbers_;
  std::atomic<bool> side_failed_{false};
};

}  // namespace

void race(std::uint64_t seed, Watchdog& watchdog, Tally& tally) {
  Random random(seed);
  World world(random);
  const int ending = pick(random, 0, 5);
  Round round{world,
              watchdog,
              tally,
              seed * 1000 + 1,
              pick(random, 1, 3),
              pick(random, 3, 12),
              ending == 0   ? End::kAbort
              : ending == 1 ? End::kCut
                            : End::kClose,
              pick(random, 0, world.size() - 1)};
  run_ranks(world.size(), [&](int rank) { Rank(round, rank).run(); });
}

}  // namespace shoal::stress
