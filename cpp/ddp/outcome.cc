#include "ddp/outcome.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace shoal::ddp {

std::vector<std::uint8_t> encode_flags(Report report, const std::vector<bool>& used) {
  const std::uint32_t extra = std::min(report.extra, kMostExtra);
  std::vector<std::uint8_t> flags;
  flags.reserve(3 + used.size());
  for (std::uint32_t number : {std::uint32_t{report.trouble}, extra, kMostExtra - extra})
    flags.push_back(static_cast<std::uint8_t>(number));
  for (bool one : used) flags.push_back(one);
  return flags;
}

Outcome decode_flags(std::span<const std::uint8_t> maximum) {
  if (maximum.size() < 3) throw std::invalid_argument("the flags of a pass are at least three");
  const auto used = maximum.subspan(3);
  return {maximum[0] == 0 && maximum[1] + maximum[2] == kMostExtra, {used.begin(), used.end()}};
}

Tail encode_tail(Report report) {
  const double extra = std::min(report.extra, kMostExtra);
  return {report.trouble ? 1.0 : 0.0, extra, extra * extra};
}

bool decode_tail(const Tail& mean, double epsilon) {
  const auto [trouble, extra, square] = mean;
  return trouble == 0 && std::abs(extra * extra - square) <= 4 * epsilon * std::abs(square);
}

}  // namespace shoal::ddp
