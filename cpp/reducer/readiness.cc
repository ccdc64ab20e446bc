#include "reducer/readiness.h"

#include <algorithm>
#include <stdexcept>

namespace shoal::reducer {

Readiness::Readiness(std::span<const std::vector<std::uint32_t>> buckets) {
  std::size_t parameters = 0;
  for (const auto& members : buckets) {
    sizes_.push_back(static_cast<std::uint32_t>(members.size()));
    parameters += members.size();
  }
  pending_ = sizes_;
  arrived_.resize(parameters, false);
  arrival_.reserve(parameters);
  constexpr std::uint32_t kNone = ~std::uint32_t{0};
  bucket_of_.resize(parameters, kNone);
  for (std::size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    for (std::uint32_t parameter : buckets[bucket]) {
      if (parameter >= parameters || bucket_of_[parameter] != kNone)
        throw std::invalid_argument("buckets must hold every parameter once");
      bucket_of_[parameter] = static_cast<std::uint32_t>(bucket);
    }
  }
}

void Readiness::close() {
  if (!arrival_.empty()) armed_ = false;
  std::fill(arrived_.begin(), arrived_.end(), false);
  pending_ = sizes_;
  arrival_.clear();
  ready_ = 0;
  open_ = false;
}

Mark Readiness::mark(std::uint32_t parameter) {
  if (parameter >= bucket_of_.size()) throw std::out_of_range("no such parameter");
  if (!open_ && !armed_) return Mark::kNothing;
  if (arrived_[parameter]) return Mark::kTwice;
  Mark result = open_ ? Mark::kNothing : Mark::kAttend;
  open_ = true;
  arrived_[parameter] = true;
  arrival_.push_back(parameter);
  if (--pending_[bucket_of_[parameter]] == 0 && bucket_of_[parameter] == ready_) {
    while (ready_ < pending_.size() && pending_[ready_] == 0) ++ready_;
    result = Mark::kAttend;
  }
  return result;
}

std::vector<std::uint32_t> Readiness::missing() const {
  std::vector<std::uint32_t> result;
  for (std::uint32_t parameter = 0; parameter < arrived_.size(); ++parameter) {
    if (!arrived_[parameter]) result.push_back(parameter);
  }
  return result;
}

}  // namespace shoal::reducer
