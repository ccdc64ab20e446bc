// Operations whose results are known, and the random choices of the stress test.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/clock.h"
#include "engine/context.h"

namespace shoal::stress {

using Random = std::mt19937_64;

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::int64_t kPatience = 120 * kSecond;  // sanitizers are slow; a hang is a hang anyway
constexpr std::size_t kCapacity = 128 << 20;
constexpr std::uint64_t kKeyed = 1ULL << 62;

inline std::uint64_t current_seed = 0;

[[noreturn]] inline void die(const std::string& what) {
  std::fprintf(stderr, "stress: with seed %llu: %s\n", static_cast<unsigned long long>(current_seed),
               what.c_str());
  std::fflush(stderr);
  std::abort();
}

inline void check(bool good, const std::string& what) {
  if (!good) die(what);
}

inline int pick(Random& random, int from, int to) {
  return std::uniform_int_distribution<int>(from, to)(random);
}

inline void dawdle(Random& random) {
  switch (pick(random, 0, 9)) {
    case 0:
      std::this_thread::sleep_for(std::chrono::microseconds(pick(random, 1, 500)));
      break;
    case 1:
    case 2:
      std::this_thread::yield();
      break;
    default:
      break;
  }
}

// Element `i` of what rank `rank` puts into operation `salt`: small, so that float32 sums are exact.
inline std::int32_t value(std::uint64_t salt, int rank, std::uint64_t i) {
  return static_cast<std::int32_t>((salt * 31 + static_cast<std::uint64_t>(rank) * 17 + i) % 1021);
}

// Elements of int32 or float32 in ordinary or in shared memory.
class Buffer {
 public:
  Buffer(Group& group, DType dtype, std::uint64_t count, bool shared) : dtype_(dtype), count_(count) {
    if (shared)
      block_ = group.allocate(std::max<std::size_t>(bytes(), 4));
    else
      heap_.resize(count);
  }
  std::uint64_t bytes() const { return count_ * 4; }
  Span span() const { return {data(), bytes()}; }
  Span part(std::uint64_t first, std::uint64_t count) const { return {data() + first * 4, count * 4}; }
  void set(std::uint64_t i, std::int32_t v) {
    float f = static_cast<float>(v);
    std::memcpy(data() + i * 4, dtype_ == DType::kFloat32 ? static_cast<const void*>(&f) : &v, 4);
  }
  std::int64_t get(std::uint64_t i) const {
    float f;
    std::int32_t v;
    std::memcpy(&f, data() + i * 4, 4);
    std::memcpy(&v, data() + i * 4, 4);
    return dtype_ == DType::kFloat32 ? static_cast<std::int64_t>(f) : v;
  }
  void fill(std::uint64_t salt, int rank) {
    for (std::uint64_t i = 0; i < count_; ++i) set(i, value(salt, rank, i));
  }
  void expect(const char* what, std::uint64_t first, std::uint64_t count, auto&& wanted) const {
    for (std::uint64_t i = 0; i < count; ++i)
      if (get(first + i) != wanted(i))
        die(std::string(what) + ": element " + std::to_string(i) + " of " + std::to_string(count) + " is " +
            std::to_string(get(first + i)) + ", not " + std::to_string(wanted(i)));
  }

 private:
  std::byte* data() const {
    return block_ ? block_->data() : reinterpret_cast<std::byte*>(const_cast<std::int32_t*>(heap_.data()));
  }
  DType dtype_;
  std::uint64_t count_;
  std::shared_ptr<Block> block_;
  std::vector<std::int32_t> heap_;
};

// One operation on its way.  Keeps its memory until it is done.
class Call {
 public:
  // The plan is equal on all ranks; `shared` is each rank's own choice.
  struct Plan {
    Kind kind;
    DType dtype;
    std::uint64_t count;
    int root;
    std::uint64_t salt;
  };

  Call(Group& group, Plan plan, bool shared, std::uint64_t channel, bool keyed) : group_(group), plan_(plan) {
    const auto size = static_cast<std::uint64_t>(group.size());
    const int rank = group.rank();
    const bool root = rank == plan.root;
    Request request;
    request.kind = plan.kind;
    request.channel = channel;
    request.keyed = keyed;
    request.reduction = {plan.dtype, RedOp::kSum, 1.0, static_cast<std::uint32_t>(size)};
    request.count = plan.count;
    request.root = plan.root;
    request.timeout = kPatience;
    auto make = [&](std::uint64_t count) {
      return std::make_unique<Buffer>(group, plan.dtype, count, shared);
    };
    bool gathers = plan.kind == Kind::kAllGather || plan.kind == Kind::kGather;
    bool spreads =
        plan.kind == Kind::kReduceScatter || plan.kind == Kind::kScatter || plan.kind == Kind::kAllToAll;
    if (plan.kind != Kind::kBarrier) {
      in_ = make(spreads ? plan.count * size : plan.count);
      in_->fill(plan.salt, rank);
    }
    if (gathers || plan.kind == Kind::kAllToAll) out_ = make(plan.count * size);
    if (plan.kind == Kind::kReduceScatter || plan.kind == Kind::kScatter) out_ = make(plan.count);
    auto whole = [&](const Buffer& buffer) { return std::vector<Span>(1, buffer.span()); };
    auto parts = [&](const Buffer& buffer) {
      std::vector<Span> spans;
      for (std::uint64_t i = 0; i < size; ++i) spans.push_back(buffer.part(i * plan.count, plan.count));
      return spans;
    };
    switch (plan.kind) {
      case Kind::kBarrier:
        break;
      case Kind::kAllReduce:
        request.in = request.out = whole(*in_);
        break;
      case Kind::kReduce:
        request.in = whole(*in_);
        if (root) request.out = request.in;
        break;
      case Kind::kBroadcast:
        request.out = whole(*in_);
        if (root) request.in = request.out;
        break;
      case Kind::kAllGather:
        request.in = whole(*in_);
        request.out = plan.salt % 2 ? whole(*out_) : parts(*out_);
        break;
      case Kind::kGather:
        request.in = whole(*in_);
        if (root) request.out = parts(*out_);
        break;
      case Kind::kReduceScatter:
        request.in = plan.salt % 2 ? whole(*in_) : parts(*in_);
        request.out = whole(*out_);
        break;
      case Kind::kScatter:
        if (root) request.in = parts(*in_);
        request.out = whole(*out_);
        break;
      default:
        request.in = parts(*in_);
        request.out = parts(*out_);
    }
    op_ = group.submit(std::move(request));
  }

  // False if it failed; what has succeeded must be right.
  bool finish() {
    check(group_.context().wait(*op_, now_ns() + 2 * kPatience), "an operation hangs");
    if (op_->error().code != ErrorCode::kNone) return false;
    verify();
    return true;
  }
  const Operation& operation() const { return *op_; }

 private:
  void verify() const {
    const int size = group_.size(), rank = group_.rank();
    const auto& [kind, dtype, count, root, salt] = plan_;
    auto sum = [&](std::uint64_t offset) {
      return [&, offset, salt = salt](std::uint64_t i) {
        std::int64_t total = 0;
        for (int r = 0; r < size; ++r) total += value(salt, r, offset + i);
        return total;
      };
    };
    auto from = [&](int source, std::uint64_t offset) {
      return [source, offset, salt = salt](std::uint64_t i) {
        return static_cast<std::int64_t>(value(salt, source, offset + i));
      };
    };
    switch (kind) {
      case Kind::kBarrier:
        return;
      case Kind::kAllReduce:
        return in_->expect("all_reduce", 0, count, sum(0));
      case Kind::kReduce:
        if (rank == root) return in_->expect("reduce", 0, count, sum(0));
        return in_->expect("reduce's input", 0, count, from(rank, 0));
      case Kind::kBroadcast:
        return in_->expect("broadcast", 0, count, from(root, 0));
      case Kind::kAllGather:
      case Kind::kGather:
        for (int r = 0; r < size && (kind == Kind::kAllGather || rank == root); ++r)
          out_->expect("gather", static_cast<std::uint64_t>(r) * count, count, from(r, 0));
        return;
      case Kind::kReduceScatter:
        return out_->expect("reduce_scatter", 0, count, sum(static_cast<std::uint64_t>(rank) * count));
      case Kind::kScatter:
        return out_->expect("scatter", 0, count, from(root, static_cast<std::uint64_t>(rank) * count));
      default:
        for (int r = 0; r < size; ++r)
          out_->expect("all_to_all", static_cast<std::uint64_t>(r) * count, count,
                       from(r, static_cast<std::uint64_t>(rank) * count));
    }
  }

  Group& group_;
  Plan plan_;
  std::unique_ptr<Buffer> in_, out_;
  OperationPtr op_;
};

inline Call::Plan plan(Random& script, int size) {
  static constexpr std::uint64_t sizes[] = {0, 1, 7, 64, 300, 1024, 1025, 9'000, 70'000, 300'000};
  auto kind = static_cast<Kind>(pick(script, 1, 9));
  std::uint64_t count = kind == Kind::kBarrier ? 0 : sizes[pick(script, 0, 9)];
  if (count * static_cast<std::uint64_t>(size) > 600'000) count /= static_cast<std::uint64_t>(size);
  bool rooted =
      kind == Kind::kReduce || kind == Kind::kBroadcast || kind == Kind::kGather || kind == Kind::kScatter;
  return {kind, pick(script, 0, 1) ? DType::kFloat32 : DType::kInt32, count,
          rooted ? pick(script, 0, size - 1) : -1, script() % 1'000'000};
}

}  // namespace shoal::stress
