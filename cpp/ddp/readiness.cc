#include "ddp/readiness.h"

#include <algorithm>
#include <stdexcept>

namespace shoal::ddp {

Readiness::Readiness(std::span<const std::vector<std::uint32_t>> buckets,
                     std::span<const std::uint32_t> expected)
    : expected_(expected.begin(), expected.end()),
      sizes_(buckets.size(), 0),
      counts_(expected.size(), 0),
      skipped_(expected.size(), false),
      order_(expected.size(), 0) {
  const std::size_t parameters = expected.size();
  constexpr std::uint32_t kNone = ~std::uint32_t{0};
  bucket_of_.resize(parameters, kNone);
  for (std::size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    for (std::uint32_t parameter : buckets[bucket]) {
      if (parameter >= parameters || bucket_of_[parameter] != kNone)
        throw std::invalid_argument("buckets must hold every parameter once");
      bucket_of_[parameter] = static_cast<std::uint32_t>(bucket);
      if (expected_[parameter] > 0) ++sizes_[bucket];
    }
  }
  if (std::find(bucket_of_.begin(), bucket_of_.end(), kNone) != bucket_of_.end())
    throw std::invalid_argument("buckets must hold every parameter once");
  pending_ = sizes_;
}

void Readiness::close() {
  if (arrived_ > 0) armed_ = false;
  std::fill(counts_.begin(), counts_.end(), 0);
  std::fill(skipped_.begin(), skipped_.end(), false);
  std::fill(order_.begin(), order_.end(), 0);
  pending_ = sizes_;
  arrived_ = 0;
  ready_ = 0;
  open_ = false;
}

Mark Readiness::mark(std::uint32_t parameter) {
  if (parameter >= bucket_of_.size()) throw std::out_of_range("no such parameter");
  if (!open_ && !armed_) return Mark::kIgnored;
  open_ = true;
  if (!learning_) {
    if (complete(parameter)) return Mark::kUnexpected;
    if (skipped_[parameter]) {
      if (bucket_of_[parameter] < ready_) return Mark::kUnexpected;
      skipped_[parameter] = false;
      ++pending_[bucket_of_[parameter]];
    }
  }
  ++counts_[parameter];
  order_[parameter] = ++arrived_;
  const bool more = !learning_ && complete(parameter) && settle(parameter);
  return more || arrived_ == 1 ? Mark::kProceed : Mark::kArrived;
}

void Readiness::skip(std::uint32_t parameter) {
  if (parameter >= bucket_of_.size()) throw std::out_of_range("no such parameter");
  if (learning_ || skipped_[parameter] || complete(parameter)) return;
  skipped_[parameter] = true;
  settle(parameter);
}

// One parameter less to wait for; true if another bucket is ready.
bool Readiness::settle(std::uint32_t parameter) {
  --pending_[bucket_of_[parameter]];
  return advance();
}

bool Readiness::advance() {
  const std::size_t before = ready_;
  while (ready_ < pending_.size() && pending_[ready_] == 0) ++ready_;
  return ready_ > before;
}

std::vector<std::uint32_t> Readiness::arrival() const {
  std::vector<std::uint32_t> result;
  for (std::uint32_t parameter = 0; parameter < order_.size(); ++parameter) {
    if (order_[parameter] > 0) result.push_back(parameter);
  }
  std::sort(result.begin(), result.end(),
            [this](std::uint32_t a, std::uint32_t b) { return order_[a] < order_[b]; });
  return result;
}

std::vector<std::uint32_t> Readiness::missing() const {
  std::vector<std::uint32_t> result;
  for (std::uint32_t parameter = 0; parameter < counts_.size(); ++parameter) {
    if (!complete(parameter)) result.push_back(parameter);
  }
  return result;
}

}  // namespace shoal::ddp
