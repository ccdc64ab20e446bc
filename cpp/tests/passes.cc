// Random backward passes on several ranks, compared with a short model.
//
// The ranks run one after another, so nothing is sent: the model predicts every rank's report and checks it.
// It also knows which buckets each rank may have sent after every gradient.

#include <algorithm>
#include <optional>
#include <vector>

#include "ddp/pass.h"
#include "tests/scenes.h"
#include "tests/support.h"

namespace shoal::stress {
namespace {

using namespace shoal::ddp;
using Indices = std::vector<std::uint32_t>;

// One rank's part of one pass.
struct Plan {
  std::uint32_t forwards = 1;
  Indices gradients;  // in order of arrival
  Indices unreached;
  bool interrupted = false;
  bool shadow = false;
};

struct Model {
  Rules rules;
  bool separate = false;
  std::vector<Indices> buckets;
  Indices expected;
  bool learning = false;
  std::vector<bool> used;  // by parameter: any rank has a gradient (unless reported in each pass)

  bool separated() const { return separate || learning || rules.find_unused; }

  std::vector<bool> came(const Plan& plan) const {
    std::vector<bool> result(expected.size(), false);
    for (std::uint32_t index : plan.gradients) result[index] = true;
    return result;
  }

  std::vector<bool> used_in(const std::vector<Plan>& plans) const {
    if (!separated()) return used;
    std::vector<bool> result(expected.size(), false);
    for (const Plan& plan : plans)
      for (std::uint32_t index : plan.gradients) result[index] = true;
    return result;
  }

  bool lacks(const Plan& plan) const {
    if (plan.shadow || learning || rules.find_unused) return false;
    for (std::uint32_t index = 0; index < expected.size(); ++index) {
      const auto count = std::count(plan.gradients.begin(), plan.gradients.end(), index);
      if (count < expected[index] && (rules.copies == 1 || count == 0)) return true;
    }
    return false;
  }

  // Number of complete buckets, in order, after the first `gradients` of a plan.
  std::size_t complete(const Plan& plan, std::size_t gradients) const {
    if (learning) return 0;
    std::size_t number = 0;
    for (; number < buckets.size(); ++number) {
      for (std::uint32_t index : buckets[number]) {
        const auto end = plan.gradients.begin() + static_cast<std::ptrdiff_t>(gradients);
        const bool skipped = std::count(plan.unreached.begin(), plan.unreached.end(), index) > 0;
        if (!skipped && std::count(plan.gradients.begin(), end, index) < expected[index]) return number;
      }
    }
    return number;
  }

  // A rank whose pass was ended by an exception can report it only if something is left to send.
  bool trouble(const Plan& plan) const {
    const bool sent_all = complete(plan, plan.gradients.size()) == buckets.size();
    return lacks(plan) || (plan.interrupted && (separated() || !sent_all));
  }

  bool well(const std::vector<Plan>& plans) const {
    const auto capped = [](const Plan& plan) { return std::min(plan.forwards - 1, kMostExtra); };
    return std::none_of(plans.begin(), plans.end(), [&](const Plan& plan) { return trouble(plan); }) &&
           std::all_of(plans.begin(), plans.end(),
                       [&](const Plan& plan) { return capped(plan) == capped(plans[0]); });
  }
};

// Performs the actions of one rank's pass, and knows the other ranks' reports.
class Rank final : public Actions {
 public:
  Rank(Pass& pass, const Model& model, const std::vector<Plan>& plans, std::size_t rank)
      : pass_(pass), model_(model), plans_(plans), rank_(rank) {}

  bool fill(std::size_t bucket) override {
    if (bucket == kOutcome) {
      check(!model_.separated(), "the tail is written where there is a message");
      check(sent < model_.buckets.size(), "the tail is written after its bucket was sent");
      tail_ = pass_.tail();
    } else {
      check(bucket == sent, "a bucket is filled that is not the next to be sent");
      filled_ = true;
    }
    return true;
  }

  void send(std::size_t bucket) override {
    if (bucket == kOutcome) {
      check(model_.separated() && sent == model_.buckets.size(), "the outcome is sent out of turn");
      flags_ = pass_.flags(std::vector<bool>(model_.expected.size(), false));
      return;
    }
    check(bucket == sent++, "a bucket is sent out of turn");
    check(filled_ || !model_.rules.fill_all, "a bucket is sent without being filled");
    const std::vector<bool> came = model_.came(plans_[rank_]);
    for (std::uint32_t index : model_.buckets[bucket])
      check(filled_ || came[index], "a bucket is sent with what is left of an earlier pass");
    filled_ = false;
  }

  void wait(std::size_t bucket) override {
    if (bucket != kOutcome) {
      check(bucket == waited++, "a bucket is waited for out of turn");
      return;
    }
    check(waited == model_.buckets.size(), "the outcome is read before all buckets are there");
    model_.separated() ? exchange_flags() : average_tails();
  }

  void deliver(const std::vector<bool>& used) override { delivered = used; }

  std::size_t sent = 0;
  std::size_t waited = 0;
  std::optional<std::vector<bool>> delivered;

 private:
  Report report(const Plan& plan) const { return {model_.trouble(plan), plan.forwards - 1}; }

  void exchange_flags() {
    std::vector<std::uint8_t> maximum(flags_.size(), 0);
    for (const Plan& plan : plans_) {
      const auto said = encode_flags(report(plan), model_.came(plan));
      if (&plan == &plans_[rank_]) check(said == flags_, "a rank's flags are wrong");
      for (std::size_t i = 0; i < said.size(); ++i) maximum[i] = std::max(maximum[i], said[i]);
    }
    pass_.decode(maximum);
  }

  void average_tails() {
    Tail mean{};
    for (const Plan& plan : plans_) {
      const Tail said = encode_tail(report(plan));
      if (&plan == &plans_[rank_]) check(said == tail_, "a rank's tail is wrong");
      for (std::size_t i = 0; i < said.size(); ++i) mean[i] += said[i] / static_cast<double>(plans_.size());
    }
    pass_.decode(mean, 1.2e-7);
  }

  Pass& pass_;
  const Model& model_;
  const std::vector<Plan>& plans_;
  std::size_t rank_;
  bool filled_ = false;
  Tail tail_{};
  std::vector<std::uint8_t> flags_;
};

Model random_model(Random& random) {
  Model model;
  model.rules = {chance(random, 3), chance(random, 4), chance(random, 4),
                 static_cast<std::uint32_t>(chance(random, 4) ? pick(random, 2, 3) : 1)};
  if (model.rules.learn) model.rules.find_unused = false;
  model.learning = model.rules.learn;
  model.separate = chance(random, 3);
  Indices order(pick(random, 1, 12));
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint32_t>(i);
  std::shuffle(order.begin(), order.end(), random);
  for (std::uint32_t index : order) {
    if (model.buckets.empty() || chance(random, 3)) model.buckets.emplace_back();
    model.buckets.back().push_back(index);
  }
  model.expected.assign(order.size(), model.rules.copies);
  model.used.assign(order.size(), true);
  return model;
}

Plan random_plan(Random& random, const Model& model) {
  Plan plan;
  plan.forwards = static_cast<std::uint32_t>(chance(random, 6) ? pick(random, 2, 20) : 1);
  plan.shadow = chance(random, 10);
  plan.interrupted = !plan.shadow && chance(random, 10);
  if (plan.shadow) return plan;
  const int missing = pick(random, 0, 5);
  for (std::uint32_t index = 0; index < model.expected.size(); ++index) {
    if (missing == 0 && chance(random, 3)) continue;
    if (model.rules.find_unused && chance(random, 4)) {
      plan.unreached.push_back(index);
      continue;
    }
    const bool few = model.learning || (model.rules.copies > 1 && chance(random, 4));
    const std::uint32_t count = few ? static_cast<std::uint32_t>(pick(random, 0, 2)) : model.expected[index];
    plan.gradients.insert(plan.gradients.end(), std::min(count, model.learning ? 9U : model.expected[index]),
                          index);
  }
  std::shuffle(plan.gradients.begin(), plan.gradients.end(), random);
  return plan;
}

// Runs one pass of one rank; `pass` learns from it.
void run(Pass& pass, const Model& model, const std::vector<Plan>& plans, std::size_t number) {
  const Plan& plan = plans[number];
  Rank rank(pass, model, plans, number);
  for (std::uint32_t i = 0; i < plan.forwards; ++i) pass.expect(true, model.rules.copies);
  if (plan.shadow) {
    pass.open();
    pass.begin(rank, {});
  }
  for (std::size_t i = 0; i < plan.gradients.size(); ++i) {
    const Mark mark = pass.mark(plan.gradients[i]);
    check(mark == Mark::kArrived || mark == Mark::kProceed, "a gradient is refused");
    check(i > 0 || mark == Mark::kProceed, "the first gradient goes unnoticed");
    if (mark == Mark::kProceed) {
      if (i == 0) pass.begin(rank, plan.unreached);
      pass.launch(rank);
    }
    check(rank.sent == model.complete(plan, i + 1), "not the buckets that are complete are sent");
  }
  const std::uint64_t before = pass.number();
  const End end = pass.finish(rank, plan.interrupted, plan.shadow);
  check(rank.sent == model.buckets.size() && rank.waited == rank.sent, "a bucket is forgotten");
  check(pass.number() == before + 1, "a pass is not counted");
  check(end == (model.well(plans) ? End::kWell : End::kTrouble), "the outcome is wrong");
  check(rank.delivered.has_value() == (end == End::kWell), "averages are delivered at the wrong time");
  check(!rank.delivered || *rank.delivered == model.used_in(plans), "the wrong parameters count as used");
}

}  // namespace

void passes(std::uint64_t seed) {
  Random random(seed);
  Model model = random_model(random);
  const auto size = static_cast<std::size_t>(pick(random, 1, 4));
  std::vector<Pass> ranks;
  for (std::size_t i = 0; i < size; ++i) {
    ranks.emplace_back(model.rules, model.buckets, model.expected);
    ranks.back().set_separate(model.separate);
  }
  bool order_is_known = false;
  for (int step = 0; step < 8; ++step) {
    std::vector<Plan> plans;
    for (std::size_t i = 0; i < size; ++i) plans.push_back(random_plan(random, model));
    // Either all ranks have a pass or none has one, and at least one rank has a batch.
    const auto first =
        std::find_if(plans.begin(), plans.end(), [](const Plan& plan) { return !plan.shadow; });
    const bool nothing = std::any_of(plans.begin(), plans.end(), [](const Plan& plan) {
      return plan.gradients.empty() && !plan.interrupted && !plan.shadow;
    });
    if (nothing || first == plans.end()) continue;
    for (std::size_t i = 0; i < size; ++i) run(ranks[i], model, plans, i);
    const bool well = model.well(plans);
    std::optional<Indices> order;
    for (std::size_t i = 0; i < size; ++i) {
      const auto own = ranks[i].take_order();
      check(own.has_value() == (well && !order_is_known), "the order is reported at the wrong time");
      if (own && i == 0) order = own;
    }
    if (order) {
      order_is_known = true;
      Indices sorted = *order;
      std::sort(sorted.begin(), sorted.end());
      for (std::size_t i = 0; i < sorted.size(); ++i) check(sorted[i] == i, "the order is not a permutation");
      if (model.learning) model.used = model.used_in(plans);
      model.learning = false;
      model.expected = ranks[first - plans.begin()].expected();
      model.buckets.assign(1, *order);  // one bucket, in the order of arrival
      for (Pass& pass : ranks) pass.rebuild(model.buckets, model.expected);
    }
    for (Pass& pass : ranks) {
      pass.close();
      check(!pass.opened() && pass.report().extra == 0, "a pass outlives its end");
    }
  }
}

}  // namespace shoal::stress
