// Counters of the operations of a group on this rank: numbers, bytes, latencies, and the time spent on
// waiting for each member.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace shoal {

// Latencies are counted in buckets, four per octave from 256 ns on: 0, 256, 320, 384, 448, 512, 640, ... ns.
namespace latency {

constexpr int kBuckets = 128;
constexpr int kFirstOctave = 8;

inline int bucket_of(std::int64_t nanoseconds) {
  const auto value = static_cast<std::uint64_t>(std::max<std::int64_t>(nanoseconds, 0));
  const int octave = std::bit_width(value) - 1;
  if (octave < kFirstOctave) return 0;
  const int quarter = static_cast<int>(value >> (octave - 2) & 3);
  return std::min(kBuckets - 1, (octave - kFirstOctave) * 4 + quarter + 1);
}

// The least latency of a bucket, in nanoseconds.
inline std::uint64_t least(int bucket) {
  if (bucket <= 0) return 0;
  const int octave = kFirstOctave + (bucket - 1) / 4;
  return (4 + static_cast<std::uint64_t>(bucket - 1) % 4) << (octave - 2);
}

// The latency in nanoseconds that this share of operations did not exceed, from the numbers of operations in
// each bucket: the middle of a bucket, which is correct to 12.5 %.  Negative if there are none.
inline double quantile(const std::vector<std::uint64_t>& counts, double share) {
  double all = 0;
  for (const std::uint64_t count : counts) all += static_cast<double>(count);
  double left = all * share, result = -1;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0) continue;
    const int bucket = static_cast<int>(i);
    result = static_cast<double>(least(bucket) + least(bucket + 1)) / 2;
    left -= static_cast<double>(counts[i]);
    if (left <= 0) break;
  }
  return result;
}

}  // namespace latency

// A number that only grows; any thread may read it.
class Counter {
 public:
  // With a single writer at a time, a load and a store suffice, which cost less than an atomic addition.
  enum class Writers { kOne, kSeveral };
  void add(std::uint64_t amount, Writers writers) {
    if (writers == Writers::kSeveral)
      value_.fetch_add(amount, std::memory_order_relaxed);
    else
      value_.store(value_.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }
  std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

// A member that this rank waited for.
struct LateMember {
  int rank = 0;              // in the group
  std::uint64_t times = 0;   // number of completed operations in which it arrived last
  std::uint64_t waited = 0;  // nanoseconds
};

struct OperationCounts {
  std::uint64_t completed = 0, failed = 0;
  std::uint64_t bytes = 0;   // of completed operations: the longer of input and output
  std::uint64_t waits = 0;   // number of waits for members that had not called the operation yet
  std::uint64_t waited = 0;  // nanoseconds of these waits
};

// A copy of the counters.
struct StatisticsValues : OperationCounts {
  std::vector<LateMember> late;  // the members that were waited for, those with the longest time first
  std::vector<std::uint64_t> latencies = std::vector<std::uint64_t>(latency::kBuckets);

  void sort_late() {
    std::ranges::sort(late, [](const LateMember& a, const LateMember& b) { return a.waited > b.waited; });
  }
};

// The counters of one lane, or of all operations without a lane.
class Statistics {
 public:
  Statistics(int members, Counter::Writers writers) : writers_(writers), late_(members) {}

  void waited(int member, std::int64_t nanoseconds) {  // -1: it is not known for which member
    const auto time = static_cast<std::uint64_t>(std::max<std::int64_t>(nanoseconds, 0));
    waits_.add(1, writers_);
    waited_.add(time, writers_);
    if (Late* late = find(member)) late->waited.add(time, writers_);
  }
  // last: the member that arrived last; -1: this rank, or unknown.  Not counted for a failed operation, to
  // which some members may never have come.
  void ended(bool failed, std::uint64_t bytes, std::int64_t nanoseconds, int last) {
    (failed ? failed_ : completed_).add(1, writers_);
    if (failed) return;
    if (Late* late = find(last)) late->times.add(1, writers_);
    bytes_.add(bytes, writers_);
    latencies_[latency::bucket_of(nanoseconds)].add(1, writers_);
  }
  void add_to(StatisticsValues& sum, std::vector<LateMember>& late) const {
    sum.completed += completed_.get();
    sum.failed += failed_.get();
    sum.bytes += bytes_.get();
    sum.waits += waits_.get();
    sum.waited += waited_.get();
    for (std::size_t i = 0; i < late_.size(); ++i) {
      late[i].times += late_[i].times.get();
      late[i].waited += late_[i].waited.get();
    }
    for (std::size_t i = 0; i < latency::kBuckets; ++i) sum.latencies[i] += latencies_[i].get();
  }

 private:
  struct Late {
    Counter times, waited;
  };
  Late* find(int member) {
    const auto index = static_cast<std::size_t>(member);
    return member >= 0 && index < late_.size() ? &late_[index] : nullptr;
  }

  const Counter::Writers writers_;
  Counter completed_, failed_, bytes_, waits_, waited_;
  Counter latencies_[latency::kBuckets];
  std::vector<Late> late_;
};

}  // namespace shoal
