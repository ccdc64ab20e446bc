// All-reduce and reduce within a host.
//
// Small: every member reduces what all have in their slots.  In shared memory: member r reads slice r of
// every buffer, reduces in registers and writes the result to all: one pass.  Otherwise: chunk by chunk, each
// member copies in, reduces its slice of all staging buffers, and copies the others' slices out; copying in
// runs one chunk ahead.

#include <algorithm>

#include "collectives/phase.h"
#include "engine/context.h"

namespace shoal::collectives {
namespace {

constexpr std::uint64_t kStride = 4 << 20;  // bytes between looks at whether the group is still whole
constexpr std::uint64_t kStream = 8 << 20;  // results larger than this bypass the caches

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
  if (!work.wanted(work.phase.self()) || work.data.bytes == 0) return;
  for (int place = 0; place < work.phase.size(); ++place)
    work.sources.push_back(work.phase.part(place, 0, work.data.bytes));
  void* to = work.data.data;
  kernels::reduce(work.reduction, &to, 1, work.sources.data(), work.sources.size(),
                  work.data.bytes / work.item, false);
}

// False if the group broke meanwhile: the slice is not whole, and nobody may be told that it is.
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
    kernels::reduce(work.reduction, work.destinations.data(), work.destinations.size(), work.sources.data(),
                    work.sources.size(), count, stream);
    group.context().reached(Fault::kWriting);
  }
  return true;
}

Task reduce_staged(Work& work) {
  Phase& phase = work.phase;
  const int size = phase.size(), self = phase.self();
  const std::uint64_t chunks = (work.data.bytes + kChunk - 1) / kChunk;
  auto chunk_bytes = [&](std::uint64_t chunk) {
    return std::min<std::uint64_t>(kChunk, work.data.bytes - chunk * kChunk);
  };
  auto result = [&](int place, std::uint64_t chunk) {
    return phase.staging(place, (2 + (chunk & 1)) * kChunk, kChunk);
  };
  const bool staging = phase.exposure() == Exposure::kStaged;
  // Everybody needs room for results; only those outside shared memory copy in.
  phase.my_staging();
  Task before = phase.all(&Counters::taken, 0);
  co_await before;
  for (std::uint64_t chunk = 0; chunk < std::min<std::uint64_t>(2, chunks); ++chunk) {
    if (staging) {
      Task stage = phase.stage(chunk);
      co_await stage;
    } else {
      phase.advance(&Counters::staged, chunk + 1);
    }
  }
  for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
    Task staged = phase.all(&Counters::staged, chunk + 1);
    co_await staged;
    if (chunk >= 2) {
      Task free = phase.all(&Counters::taken, chunk - 1);
      co_await free;
    }
    const std::uint64_t base = chunk * kChunk, count = chunk_bytes(chunk) / work.item;
    auto [first, last] = share(count, work.item, size, self);
    if (last > first) {
      work.sources.clear();
      work.destinations.clear();
      for (int place = 0; place < size; ++place) {
        std::byte* from = phase.slot(place).exposure == Exposure::kStaged
                              ? phase.staging(place, (chunk & 1) * kChunk, kChunk)
                              : phase.part(place, 0, chunk_bytes(chunk), base);
        work.sources.push_back(from + first * work.item);
      }
      work.destinations.push_back(result(self, chunk) + first * work.item);
      if (work.wanted(self)) work.destinations.push_back(work.data.data + base + first * work.item);
      kernels::reduce(work.reduction, work.destinations.data(), work.destinations.size(), work.sources.data(),
                      work.sources.size(), last - first, false);
    }
    phase.advance(&Counters::reduced, chunk + 1);
    Task reduced = phase.all(&Counters::reduced, chunk + 1);
    co_await reduced;
    for (int place = 0; place < size && work.wanted(self); ++place) {
      auto [from, to] = share(count, work.item, size, place);
      if (place == self || to == from) continue;
      kernels::copy(work.data.data + base + from * work.item, result(place, chunk) + from * work.item,
                    (to - from) * work.item, false);
    }
    phase.advance(&Counters::taken, chunk + 1);
    if (chunk + 2 >= chunks) continue;
    if (staging) {
      Task stage = phase.stage(chunk + 2);
      co_await stage;
    } else {
      phase.advance(&Counters::staged, chunk + 3);
    }
  }
}

}  // namespace

Task shared_all_reduce(Operation& op, Span data, int root) {
  const kernels::Reduction& reduction = op.request().reduction;
  Phase phase(op);
  Work work{phase, data, root, reduction, itemsize(reduction.dtype), {}, {}};
  std::vector<Span> parts(1, data);
  Task open = phase.open(std::move(parts), kChunk);
  co_await open;
  if (phase.exposure() != Exposure::kInline || work.wanted(phase.self())) {
    Task met = phase.meet_all();
    co_await met;
  }
  if (phase.exposure() == Exposure::kInline) {
    reduce_small(work);
  } else if (phase.all_direct()) {
    if (!reduce_fused(work)) {
      auto never = op.never();
      co_await never;
    }
    phase.advance(&Counters::reduced, 1);
    op.group().context().reached(Fault::kReduced);
    Task reduced = phase.all(&Counters::reduced, 1);
    co_await reduced;
  } else {
    Task staged = reduce_staged(work);
    co_await staged;
  }
  Task close = phase.close();
  co_await close;
}

}  // namespace shoal::collectives
