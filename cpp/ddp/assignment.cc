#include "ddp/assignment.h"

#include <map>
#include <stdexcept>
#include <utility>

namespace shoal::ddp {
namespace {

std::uint64_t aligned(std::uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

void check_permutation(std::size_t count, std::span<const std::uint32_t> order) {
  std::vector<bool> seen(count, false);
  for (std::uint32_t index : order) {
    if (index >= count || seen[index])
      throw std::invalid_argument("the order of gradients is no permutation");
    seen[index] = true;
  }
  if (order.size() != count) throw std::invalid_argument("the order of gradients is no permutation");
}

}  // namespace

std::vector<Bucket> assign(std::span<const Parameter> parameters, std::span<const std::uint32_t> order,
                           std::uint64_t first_cap, std::uint64_t cap) {
  check_permutation(parameters.size(), order);

  // A bucket is complete with its last member, so sorting by that gives the order in which buckets fill.
  struct Open {
    Bucket bucket;
    std::uint64_t limit = 0;
    std::size_t last = 0;  // position of the last member in `order`
  };
  std::map<std::uint32_t, Open> open;
  std::map<std::size_t, Bucket> closed;  // by the position of the last member
  auto close = [&](Open& entry) {
    if (!entry.bucket.members.empty()) closed.emplace(entry.last, std::move(entry.bucket));
    entry.bucket = Bucket{};
  };

  for (std::size_t position = 0; position < order.size(); ++position) {
    const Parameter& parameter = parameters[order[position]];
    auto [found, fresh] = open.try_emplace(parameter.kind);
    Open& entry = found->second;
    if (fresh) entry.limit = first_cap;
    const std::uint64_t bytes = aligned(parameter.bytes);
    if (entry.bucket.bytes + bytes > entry.limit && !entry.bucket.members.empty()) {
      close(entry);
      entry.limit = cap;
    }
    entry.bucket.members.push_back(order[position]);
    entry.bucket.offsets.push_back(entry.bucket.bytes);
    entry.bucket.bytes += bytes;
    entry.last = position;
  }
  for (auto& [kind, entry] : open) close(entry);

  std::vector<Bucket> buckets;
  buckets.reserve(closed.size());
  for (auto& [last, bucket] : closed) buckets.push_back(std::move(bucket));
  return buckets;
}

}  // namespace shoal::ddp
