#include "ddp/pass.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace shoal::ddp {

Pass::Pass(Rules rules, std::span<const std::vector<std::uint32_t>> buckets,
           std::vector<std::uint32_t> expected)
    : rules_(rules),
      expected_(std::move(expected)),
      used_(expected_.size(), true),
      buckets_(buckets.size()),
      readiness_(buckets, expected_),
      learning_(rules.learn) {
  if (rules.copies == 0) throw std::invalid_argument("a model has at least one copy");
  if (learning_) readiness_.learn();
}

void Pass::rebuild(std::span<const std::vector<std::uint32_t>> buckets, std::vector<std::uint32_t> expected) {
  if (expected.size() != expected_.size()) throw std::invalid_argument("the number of parameters is fixed");
  readiness_ = Readiness(buckets, expected);
  if (learning_) readiness_.learn();
  expected_ = std::move(expected);
  buckets_ = buckets.size();
}

void Pass::expect(bool counts, std::uint32_t copies) {
  forwards_ += counts;
  copies_ = std::max(copies_, copies);
  readiness_.arm();
}

void Pass::begin(Actions& actions, std::span<const std::uint32_t> unreached) {
  gaps_ = !unreached.empty() || std::find(expected_.begin(), expected_.end(), 0) != expected_.end();
  // Any bucket may be sent from now on, and one contains the tail.
  if (forwards_ > 1 && !separate()) actions.fill(kOutcome);
  for (std::uint32_t parameter : unreached) readiness_.skip(parameter);
}

void Pass::launch(Actions& actions, std::size_t end) {
  while (sent_.size() < end) {
    const std::size_t bucket = sent_.size();
    const bool needed = !(gaps_ || rules_.fill_all) || actions.fill(bucket);
    if (needed) actions.send(bucket);
    sent_.push_back(needed);
  }
}

End Pass::finish(Actions& actions, bool interrupted, bool shadow) {
  if (readiness_.arrived() == 0 && !interrupted && !shadow) {
    readiness_.close();
    return End::kNothing;
  }
  trouble_ = interrupted;
  if (learning_ || readiness_.ready() < buckets_) {
    gaps_ = true;
    const bool may_lack = shadow || learning_ || rules_.find_unused;
    trouble_ = interrupted || (!may_lack && !missing().empty());
    if (trouble_ && !separate()) actions.fill(kOutcome);
  }
  launch(actions, buckets_);
  if (separate()) actions.send(kOutcome);
  for (std::size_t bucket = 0; bucket < buckets_; ++bucket)
    if (sent_[bucket]) actions.wait(bucket);
  actions.wait(kOutcome);
  ++number_;
  if (!outcome_.well) return End::kTrouble;
  actions.deliver(outcome_.used);
  if (!order_is_known_) learn();
  return End::kWell;
}

std::vector<std::uint8_t> Pass::flags(const std::vector<bool>& present) const {
  std::vector<bool> used = present;
  const auto& counts = readiness_.counts();
  if (used.size() != counts.size()) throw std::invalid_argument("the number of parameters is fixed");
  for (std::size_t parameter = 0; parameter < used.size(); ++parameter)
    if (counts[parameter] > 0) used[parameter] = true;
  return encode_flags(report(), used);
}

std::vector<std::uint32_t> Pass::missing() const {
  std::vector<std::uint32_t> result = readiness_.missing();
  // A small batch occupies only some of the copies; the others have nothing to add.
  if (rules_.copies > 1)
    std::erase_if(result, [&](std::uint32_t parameter) { return readiness_.counts()[parameter] > 0; });
  return result;
}

void Pass::learn() {
  order_is_known_ = true;
  if (learning_) {
    learning_ = false;
    used_ = outcome_.used;
    const std::uint64_t took_part = copies_ > 0 ? copies_ : rules_.copies;
    for (std::size_t parameter = 0; parameter < expected_.size(); ++parameter) {
      const std::uint64_t count = readiness_.counts()[parameter];
      expected_[parameter] = static_cast<std::uint32_t>((count * rules_.copies + took_part - 1) / took_part);
    }
  }
  order_ = readiness_.arrival();
  for (std::size_t parameter = expected_.size(); parameter-- > 0;)
    if (readiness_.counts()[parameter] == 0) order_->push_back(static_cast<std::uint32_t>(parameter));
}

std::optional<std::vector<std::uint32_t>> Pass::take_order() { return std::exchange(order_, std::nullopt); }

void Pass::close() {
  readiness_.close();
  forwards_ = 0;
  copies_ = 0;
  gaps_ = false;
  trouble_ = false;
  sent_.clear();
}

}  // namespace shoal::ddp
