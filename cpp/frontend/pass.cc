// The C interface of cpp/ddp: the assignment of buckets, and backward passes.
#include "ddp/pass.h"

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "ddp/assignment.h"
#include "frontend/failure.h"
#include "shoal/abi.h"

using shoal::ddp::Actions;
using shoal::ddp::Pass;
using shoal::frontend_core::Failure;
using shoal::frontend_core::guarded;

struct shoal_pass {
  Pass pass;
};

namespace {

using Members = std::vector<std::uint32_t>;

// The functions of the program.  One that fails leaves the pass by an exception.
class ProgramActions final : public Actions {
 public:
  explicit ProgramActions(const shoal_actions& actions) : actions_(actions) {}
  bool fill(std::size_t bucket) override {
    std::int32_t send = 0;
    check(actions_.fill(actions_.self, bucket, &send));
    return send != 0;
  }
  void send(std::size_t bucket) override { check(actions_.send(actions_.self, bucket)); }
  void wait(std::size_t bucket) override { check(actions_.wait(actions_.self, bucket)); }
  void deliver(const std::vector<bool>& used) override {
    const std::vector<std::uint8_t> flags(used.begin(), used.end());
    check(actions_.deliver(actions_.self, flags.data()));
  }

 private:
  static void check(std::int32_t succeeded) {
    if (succeeded == 0) throw Failure{"Error", "a function of the program failed in a backward pass"};
  }

  const shoal_actions& actions_;
};

std::vector<Members> members_of(const shoal_bucket* buckets, std::size_t count) {
  std::vector<Members> result;
  result.reserve(count);
  for (const shoal_bucket& bucket : std::span(buckets, count))
    result.emplace_back(bucket.members, bucket.members + bucket.member_count);
  return result;
}

}  // namespace

shoal_error* shoal_assign_buckets(const uint64_t* bytes, const uint32_t* kinds, const uint32_t* order,
                                  size_t count, uint64_t first_cap, uint64_t cap, shoal_bucket** buckets,
                                  size_t* bucket_count) {
  return guarded([&] {
    std::vector<shoal::ddp::Parameter> parameters;
    parameters.reserve(count);
    for (std::size_t i = 0; i < count; ++i) parameters.push_back({bytes[i], kinds[i]});
    const auto assigned = shoal::ddp::assign(parameters, std::span(order, count), first_cap, cap);
    auto made = std::make_unique<shoal_bucket[]>(assigned.size());
    std::vector<std::unique_ptr<std::uint32_t[]>> members;
    std::vector<std::unique_ptr<std::uint64_t[]>> offsets;
    for (const auto& bucket : assigned) {
      const std::size_t size = bucket.members.size();
      members.push_back(std::make_unique<std::uint32_t[]>(size));
      offsets.push_back(std::make_unique<std::uint64_t[]>(size));
      std::copy(bucket.members.begin(), bucket.members.end(), members.back().get());
      std::copy(bucket.offsets.begin(), bucket.offsets.end(), offsets.back().get());
    }
    for (std::size_t i = 0; i < assigned.size(); ++i)
      made[i] = {members[i].release(), offsets[i].release(), assigned[i].members.size(), assigned[i].bytes};
    *bucket_count = assigned.size();
    *buckets = made.release();
  });
}

void shoal_buckets_free(shoal_bucket* buckets, size_t count) {
  for (const shoal_bucket& bucket : std::span(buckets, count)) {
    delete[] bucket.members;
    delete[] bucket.offsets;
  }
  delete[] buckets;
}

shoal_error* shoal_pass_create(int32_t find_unused, int32_t learn, const shoal_bucket* buckets,
                               size_t bucket_count, const uint32_t* expected, size_t count,
                               shoal_pass** pass) {
  return guarded([&] {
    const shoal::ddp::Rules rules{.find_unused = find_unused != 0, .learn = learn != 0};
    *pass =
        new shoal_pass{Pass(rules, members_of(buckets, bucket_count), Members(expected, expected + count))};
  });
}

void shoal_pass_free(shoal_pass* pass) { delete pass; }

shoal_error* shoal_pass_rebuild(shoal_pass* pass, const shoal_bucket* buckets, size_t bucket_count,
                                const uint32_t* expected) {
  return guarded([&] {
    const std::size_t count = pass->pass.expected().size();
    pass->pass.rebuild(members_of(buckets, bucket_count), Members(expected, expected + count));
  });
}

void shoal_pass_expect(shoal_pass* pass, int32_t counts) { pass->pass.expect(counts != 0, 1); }

void shoal_pass_ignore(shoal_pass* pass) { pass->pass.ignore(); }

void shoal_pass_open(shoal_pass* pass) { pass->pass.open(); }

int32_t shoal_pass_mark(shoal_pass* pass, uint32_t parameter) {
  return static_cast<std::int32_t>(pass->pass.mark(parameter));
}

shoal_error* shoal_pass_begin(shoal_pass* pass, const shoal_actions* actions, const uint32_t* unreached,
                              size_t unreached_count) {
  return guarded([&] {
    ProgramActions program(*actions);
    pass->pass.begin(program, std::span(unreached, unreached_count));
  });
}

shoal_error* shoal_pass_launch(shoal_pass* pass, const shoal_actions* actions) {
  return guarded([&] {
    ProgramActions program(*actions);
    pass->pass.launch(program);
  });
}

shoal_error* shoal_pass_finish(shoal_pass* pass, const shoal_actions* actions, int32_t interrupted,
                               int32_t* end) {
  return guarded([&] {
    ProgramActions program(*actions);
    *end = static_cast<std::int32_t>(pass->pass.finish(program, interrupted != 0, false));
  });
}

void shoal_pass_close(shoal_pass* pass) { pass->pass.close(); }

void shoal_pass_tail(const shoal_pass* pass, double tail[SHOAL_TAIL_ELEMENTS]) {
  const shoal::ddp::Tail own = pass->pass.tail();
  static_assert(own.size() == SHOAL_TAIL_ELEMENTS);
  std::copy(own.begin(), own.end(), tail);
}

shoal_error* shoal_pass_decode_tail(shoal_pass* pass, const double mean[SHOAL_TAIL_ELEMENTS],
                                    double epsilon) {
  return guarded([&] { pass->pass.decode({mean[0], mean[1], mean[2]}, epsilon); });
}

shoal_error* shoal_pass_flags(const shoal_pass* pass, const uint8_t* present, uint8_t* flags) {
  return guarded([&] {
    const std::size_t count = pass->pass.expected().size();
    const std::vector<std::uint8_t> own = pass->pass.flags(std::vector<bool>(present, present + count));
    std::copy(own.begin(), own.end(), flags);
  });
}

shoal_error* shoal_pass_decode_flags(shoal_pass* pass, const uint8_t* flags) {
  return guarded(
      [&] { pass->pass.decode(std::span(flags, SHOAL_HEAD_FLAGS + pass->pass.expected().size())); });
}

shoal_pass_state shoal_pass_describe(const shoal_pass* pass) {
  const Pass& of = pass->pass;
  return {of.opened(), of.separate(), of.gaps(), of.report().extra, of.readiness().arrived(), of.number()};
}

shoal_error* shoal_pass_take_order(shoal_pass* pass, uint32_t* order, int32_t* known) {
  return guarded([&] {
    const auto taken = pass->pass.take_order();
    *known = taken.has_value();
    if (taken) std::copy(taken->begin(), taken->end(), order);
  });
}

void shoal_pass_expected(const shoal_pass* pass, uint32_t* expected) {
  std::copy(pass->pass.expected().begin(), pass->pass.expected().end(), expected);
}

void shoal_pass_counts(const shoal_pass* pass, uint32_t* counts) {
  const auto& now = pass->pass.readiness().counts();
  std::copy(now.begin(), now.end(), counts);
}

shoal_error* shoal_pass_missing(const shoal_pass* pass, uint32_t* missing, size_t* missing_count) {
  return guarded([&] {
    const Members without = pass->pass.missing();
    std::copy(without.begin(), without.end(), missing);
    *missing_count = without.size();
  });
}
