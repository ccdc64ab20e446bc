// A long life: thousands of small collectives of a few ranks.
//
// The round has chapters.  In each, the ranks make a group of all, split it and its parts again, use all
// these groups with several operations in flight, and close them; in some chapters, one group is aborted.
// Ranks do not wait for each other between chapters, so some close while others still compute, or begin the
// next while others detect the abort.  A rank continues with the script whatever happens to a group, and only
// at the end of a chapter checks whether a failure was expected.

#include <algorithm>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "tests/calls.h"
#include "tests/world.h"

namespace shoal::stress {
namespace {

enum class Mood { kEager, kYielding, kSleepy, kOneSlow };

// A part of a round, equal on all ranks.
struct Chapter {
  std::uint64_t seed;
  int number;
  Mood mood;
  int slow;  // the rank that pauses
  Extent extent;
  int steps;
  int abort_step;  // -1: no abort

  Chapter(Random& random, int number, int size) : seed(random()), number(number) {
    const int roll = pick(random, 0, 9);
    mood = roll < 6 ? Mood::kEager : roll < 8 ? Mood::kYielding : roll < 9 ? Mood::kSleepy : Mood::kOneSlow;
    slow = pick(random, 0, size - 1);
    extent = chance(random, 15) ? Extent::kLarge : Extent::kSmall;
    steps = extent == Extent::kLarge ? pick(random, 2, 8) : pick(random, 20, 200);
    abort_step = chance(random, extent == Extent::kLarge ? 2 : 3) ? pick(random, 0, steps - 1) : -1;
  }
};

// A division of the world into groups: ranks with the same label form one, -1 is in none.
struct Division {
  std::uint64_t base;  // of the groups' idents
  std::vector<int> labels;
  std::shared_ptr<Group> group;  // this rank's, if any
  std::uint64_t next = 0;        // number of its next operation

  std::vector<int> members(int label) const {
    std::vector<int> found;
    for (std::size_t r = 0; r < labels.size(); ++r)
      if (labels[r] == label) found.push_back(static_cast<int>(r));
    return found;
  }
  std::uint64_t ident(int label) const { return base + static_cast<std::uint64_t>(label); }
};

// One rank in one chapter.
class Part {
 public:
  Part(const World& world, const Chapter& chapter, int rank, Desk& desk, Tally& tally)
      : world_(world),
        chapter_(chapter),
        rank_(rank),
        desk_(desk),
        tally_(tally),
        script_(chapter.seed),
        own_(chapter.seed * 1009 + static_cast<std::uint64_t>(rank)) {}

  void play() {
    divide(std::vector<int>(world_.size(), 0));
    for (int step = 0; step < chapter_.steps; ++step) {
      if (step == chapter_.abort_step) abort_one();
      const int roll = pick(script_, 0, 19);
      if (roll == 0 && divisions_.size() < 5)
        split();
      else if (roll == 1 && divisions_.size() > 1)
        close(static_cast<std::size_t>(pick(script_, 1, static_cast<int>(divisions_.size()) - 1)));
      else
        burst();
    }
    if (chance(own_, 2)) finish_all();
    while (!divisions_.empty()) close(divisions_.size() - 1);
    finish_all();
    if (aborter_.joinable()) aborter_.join();
    for (const auto& [ident, error] : failures_)
      check(
          ident == doomed_ && error.code == ErrorCode::kAborted,
          "group " + std::to_string(ident) + " failed on rank " + std::to_string(rank_) + ": " + error.text);
  }

 private:
  void dawdle() {
    switch (chapter_.mood) {
      case Mood::kEager:
        return;
      case Mood::kYielding:
        if (chance(own_, 4)) std::this_thread::yield();
        return;
      case Mood::kSleepy:
        if (chance(own_, 10)) nap(own_, 1, 200);
        return;
      case Mood::kOneSlow:
        if (rank_ == chapter_.slow && chance(own_, 8)) nap(own_, 100, 2000);
        return;
    }
  }

  void divide(std::vector<int> labels) {
    Division division;
    division.base = (static_cast<std::uint64_t>(chapter_.number) << 24 | made_++ << 12) + 1;
    division.labels = std::move(labels);
    const int lanes = pick(script_, 1, 4);
    const bool moved = chance(script_, 3);
    const auto algorithm = static_cast<Algorithm>(pick(script_, 0, kAlgorithms - 1));
    if (int mine = division.labels[rank_]; mine >= 0) {
      dawdle();
      desk_.doing("making a group");
      auto members = division.members(mine);
      const bool moves = moved && members.size() > 1;
      division.group =
          world_.make_group(rank_, division.ident(mine), members, lanes, Scope::kAll, moves, algorithm);
      // In a program, a thread makes the communicators.
      if (moves && chance(own_, 2))
        connecting_.emplace_back(
            [group = division.group, &mpi = world_.mpi(), random = Random(own_())]() mutable {
              nap(random, 1, 500);
              mpi.connect(*group);
            });
      else if (moves)
        world_.mpi().connect(*division.group);
      if (members[0] == rank_) ++tally_.groups;
    }
    divisions_.push_back(std::move(division));
  }

  void split() {
    const auto parent = pick(script_, 0, static_cast<int>(divisions_.size()) - 1);
    std::vector<int> labels = divisions_[parent].labels;
    const int colours = pick(script_, 1, 3);
    for (int& label : labels) {
      const int colour = chance(script_, 8) ? -1 : pick(script_, 0, colours - 1);
      label = label < 0 || colour < 0 ? -1 : (label * 3 + colour) % 4096;
    }
    divide(std::move(labels));
  }

  void close(std::size_t index) {
    Division division = std::move(divisions_[index]);
    divisions_.erase(divisions_.begin() + static_cast<std::ptrdiff_t>(index));
    if (!division.group) return;
    if (chance(own_, 2)) finish_all();  // otherwise close() waits for pending operations
    desk_.doing("closing", division.group.get());
    division.group->close(now_ns() + kPatience);
  }

  // Several operations, in random groups; some are waited for now, in any order, some later.
  void burst() {
    const int count = pick(script_, 1, 6);
    for (int i = 0; i < count; ++i) {
      Division& division = divisions_[pick(script_, 0, static_cast<int>(divisions_.size()) - 1)];
      const std::uint64_t seed = script_();
      if (!division.group) continue;
      // Groups differ in size, so their plans use different random numbers.
      Random script(seed + division.group->ident());
      Plan plan = make_plan(script, division.group->size(), chapter_.extent);
      dawdle();
      calls_.push_back(
          std::make_unique<Call>(division.group, plan, make_taste(own_), division.next++, desk_, tally_));
    }
    std::shuffle(calls_.begin(), calls_.end(), own_);
    const auto stay = static_cast<std::size_t>(chance(own_, 4) ? pick(own_, 0, 6) : 0);
    while (calls_.size() > stay) finish_one();
  }

  void finish_all() {
    while (!calls_.empty()) finish_one();
  }

  void finish_one() {
    dawdle();
    auto call = std::move(calls_.back());
    calls_.pop_back();
    if (!call->finish()) failures_.try_emplace(call->group().ident(), call->operation().error());
  }

  // One group of a division is aborted by one of its members, by a separate thread at a random time.
  void abort_one() {
    const auto which = static_cast<std::size_t>(pick(script_, 0, static_cast<int>(divisions_.size()) - 1));
    const Division& division = divisions_[which];
    std::vector<int> labels;
    for (int label : division.labels)
      if (label >= 0) labels.push_back(label);
    if (labels.empty()) return;
    const int label = labels[pick(script_, 0, static_cast<int>(labels.size()) - 1)];
    const auto members = division.members(label);
    const int culprit = members[pick(script_, 0, static_cast<int>(members.size()) - 1)];
    doomed_ = division.ident(label);
    if (rank_ != culprit) return;
    ++tally_.aborts;
    aborter_ = std::thread([group = division.group, random = Random(own_())]() mutable {
      if (chance(random, 2)) nap(random, 0, 1000);
      group->abort("the stress test aborts");
    });
  }

  const World& world_;
  const Chapter& chapter_;
  const int rank_;
  Desk& desk_;
  Tally& tally_;
  Random script_, own_;              // the same numbers on all ranks, and this rank's numbers
  std::vector<Division> divisions_;  // the first is the group of all
  std::uint64_t made_ = 0;
  std::vector<std::unique_ptr<Call>> calls_;
  std::map<std::uint64_t, Error> failures_;  // the first of each group
  std::uint64_t doomed_ = 0;
  std::thread aborter_;
  std::vector<std::jthread> connecting_;
};

}  // namespace

void live(std::uint64_t seed, Watchdog& watchdog, Tally& tally) {
  Random random(seed);
  World whole(random);
  // Some rounds use a second set of connections, whose operations count for the first one.
  std::unique_ptr<World> part;
  if (chance(random, 3)) part = std::make_unique<World>(whole.hosts(), &whole);
  const World& world = part ? *part : whole;
  std::vector<Chapter> chapters;
  for (int number = 1, count = pick(random, 5, 15); number <= count; ++number)
    chapters.emplace_back(random, number, world.size());
  run_ranks(world.size(), [&](int rank) {
    Desk& desk = watchdog.desk(rank);
    for (const Chapter& chapter : chapters) Part(world, chapter, rank, desk, tally).play();
    desk.doing("closing the context");
    const std::uint64_t completed = world.at(rank).totals().completed;
    world.at(rank).close(now_ns() + 20 * kSecond);
    if (part) {
      Context& outer = whole.at(world.size() - 1 - rank);
      check(outer.totals().completed == completed, "operations were lost when their connections closed");
      outer.close(now_ns() + 20 * kSecond);
    }
    desk.doing("having finished");
  });
}

}  // namespace shoal::stress
