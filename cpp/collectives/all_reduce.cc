// All-reduce and reduce within a host.
//
// Small data: every member reduces the data in all slots.  Shared memory: member r reads slice r of every
// buffer, reduces in registers and writes the result to all buffers, in one pass.  Otherwise the pass is
// split into chunks: a member with an unshared buffer stages the data that the others reduce, they write the
// results to the same lines, and it copies them from there.  So each line moves to another core once and back
// once, and no member stages the slice that it reduces itself.

#include <algorithm>

#include "collectives/phase.h"
#include "engine/context.h"

namespace shoal::collectives {
namespace {

constexpr std::uint64_t kStride = 4 << 20;  // bytes between two checks of whether the group is broken
constexpr std::uint64_t kStream = 8 << 20;  // larger results bypass the caches
constexpr std::uint64_t kChunk = 64 << 10;  // bytes of data reduced between two announcements
constexpr std::uint64_t kSlots = 4;         // chunks in the staging buffer: data in flight stays in L2
constexpr std::uint64_t kLag = kSlots / 2;  // chunks that are reduced before the results of one are copied
constexpr std::uint64_t kBlock = 4 << 10;   // bytes copied per step of replace(): they stay in L1
static_assert(kSlots * kChunk <= kStaging);

struct Work {
  Phase& phase;
  Span data;
  int root;
  const kernels::Reduction& reduction;
  std::size_t item;
  std::vector<const void*> sources;
  std::vector<void*> destinations;

  bool wanted(int place) const { return root < 0 || place == root; }
};

void reduce_small(Work& work) {
  if (!work.wanted(work.phase.self())) return;
  for (int place = 0; place < work.phase.size(); ++place)
    work.sources.push_back(work.phase.part(place, 0, work.data.bytes));
  void* to = work.data.data;
  kernels::reduce(work.reduction, {&to, 1}, work.sources, work.data.bytes / work.item);
}

// False if the group broke meanwhile: the slice is incomplete, and must not be announced.
bool reduce_fused(Work& work) {
  Group& group = work.phase.op().group();
  auto [first, last] = share(work.data.bytes / work.item, work.item, work.phase.size(), work.phase.self());
  const bool stream = work.data.bytes >= kStream;
  for (std::uint64_t at = first; at < last; at += kStride / work.item) {
    if (group.broken()) return false;
    std::uint64_t count = std::min<std::uint64_t>(kStride / work.item, last - at);
    work.sources.clear();
    work.destinations.clear();
    for (int place = 0; place < work.phase.size(); ++place) {
      std::byte* from = work.phase.part(place, 0, count * work.item, at * work.item);
      work.sources.push_back(from);
      if (work.wanted(place)) work.destinations.push_back(from);
    }
    kernels::reduce(work.reduction, work.destinations, work.sources, count, stream);
    group.context().reached(Fault::kWriting);
  }
  return true;
}

// The pass in chunks, if some members stage.  Chunk c of a member is in slot c % kSlots of its staging
// buffer, at the same offsets as in the data.
class ChunkedReduce {
 public:
  explicit ChunkedReduce(Work& work)
      : work_(work),
        phase_(work.phase),
        chunks_((work.data.bytes + kChunk - 1) / kChunk),
        staging_(phase_.exposure() == Exposure::kStaged) {
    for (int place = 0; place < phase_.size(); ++place) staged_.push_back(phase_.stages(place));
  }

  Task run() {
    if (staging_) {
      slots_ = phase_.my_staging();
      co_await phase_.vacated();
      for (std::uint64_t chunk = 0; chunk < std::min(kSlots, chunks_); ++chunk) {
        stage(chunk);
        phase_.advance(&Counters::staged, chunk + 1);
      }
    } else {
      phase_.advance(&Counters::staged, chunks_);
    }
    for (std::uint64_t step = 0; step < chunks_ + kLag; ++step) {
      if (step < chunks_) {
        co_await phase_.all(&Counters::staged, step + 1);
        reduce(step);
        phase_.op().group().context().reached(Fault::kWriting);
        phase_.advance(&Counters::reduced, step + 1);
      }
      if (step < kLag || step - kLag >= chunks_) continue;
      const std::uint64_t chunk = step - kLag;
      co_await phase_.all(&Counters::reduced, chunk + 1);
      if (!staging_) continue;
      replace(chunk);
      if (chunk + kSlots < chunks_) phase_.advance(&Counters::staged, chunk + kSlots + 1);
    }
  }

 private:
  std::uint64_t bytes(std::uint64_t chunk) const {
    return std::min(kChunk, work_.data.bytes - chunk * kChunk);
  }
  // The byte range of a chunk that this member reduces.
  std::pair<std::uint64_t, std::uint64_t> slice(std::uint64_t chunk) const {
    auto [first, last] = share(bytes(chunk) / work_.item, work_.item, phase_.size(), phase_.self());
    return {first * work_.item, last * work_.item};
  }
  std::byte* data(std::uint64_t chunk) const { return work_.data.data + chunk * kChunk; }
  std::byte* slot(std::uint64_t chunk) const { return slots_ + chunk % kSlots * kChunk; }

  void stage(std::uint64_t chunk) {
    auto [first, last] = slice(chunk);
    kernels::copy(slot(chunk), data(chunk), first);
    kernels::copy(slot(chunk) + last, data(chunk) + last, bytes(chunk) - last);
  }

  void reduce(std::uint64_t chunk) {
    auto [first, last] = slice(chunk);
    if (last == first) return;
    work_.sources.clear();
    work_.destinations.clear();
    for (int place = 0; place < phase_.size(); ++place) {
      std::byte* lines = place == phase_.self() ? data(chunk) + first
                         : staged_[place]
                             ? phase_.staging(place, chunk % kSlots * kChunk + first, last - first)
                             : phase_.part(place, 0, last - first, chunk * kChunk + first);
      work_.sources.push_back(lines);
      if (work_.wanted(place)) work_.destinations.push_back(lines);
    }
    kernels::reduce(work_.reduction, work_.destinations, work_.sources, (last - first) / work_.item);
  }

  // Copies the results of a chunk, and stages the next chunk of this slot in the same loop, while the lines
  // are in this core's cache.
  void replace(std::uint64_t chunk) {
    const bool taking = work_.wanted(phase_.self());
    const std::uint64_t next = chunk + kSlots;
    auto [first, last] = slice(chunk);
    // A chunk of another length lacks another slice.
    const bool together = next < chunks_ && bytes(next) == bytes(chunk);
    auto turn = [&](std::uint64_t from, std::uint64_t to) {
      for (std::uint64_t at = from; at < to; at += kBlock) {
        const std::uint64_t length = std::min(kBlock, to - at);
        if (taking) kernels::copy(data(chunk) + at, slot(chunk) + at, length);
        if (together) kernels::copy(slot(chunk) + at, data(next) + at, length);
      }
    };
    turn(0, first);
    turn(last, bytes(chunk));
    if (next < chunks_ && !together) stage(next);
  }

  Work& work_;
  Phase& phase_;
  const std::uint64_t chunks_;
  const bool staging_;
  std::vector<bool> staged_;  // by member
  std::byte* slots_ = nullptr;
};

}  // namespace

Task shared_all_reduce(Operation& op, Span data, int root) {
  const kernels::Reduction& reduction = op.request().reduction;
  Phase phase(op);
  Work work{phase, data, root, reduction, itemsize(reduction.dtype), {}, {}};
  std::vector<Span> parts(1, data);
  Task open = phase.open(std::move(parts));
  co_await open;
  if (phase.exposure() != Exposure::kInline || work.wanted(phase.self())) {
    Task met = phase.meet_all();
    co_await met;
  }
  if (phase.exposure() == Exposure::kInline) {
    reduce_small(work);
  } else if (phase.all_direct()) {
    if (!reduce_fused(work)) {
      co_await op.never();
    }
    phase.advance(&Counters::reduced, 1);
    op.group().context().reached(Fault::kReduced);
    co_await phase.all(&Counters::reduced, 1);
  } else {
    ChunkedReduce relay(work);
    Task relayed = relay.run();
    co_await relayed;
  }
  // All have reduced, so no member accesses this data any more.
  phase.leave();
}

}  // namespace shoal::collectives
