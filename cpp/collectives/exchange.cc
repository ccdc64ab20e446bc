// Exchange within a host: members expose parts; others read them in place, or from staging buffers window by
// window.

#include <algorithm>

#include "collectives/phase.h"
#include "engine/context.h"

namespace shoal::collectives {
namespace {

constexpr std::uint64_t kStream = 16 << 20;  // larger results bypass the caches
constexpr std::uint64_t kShared = 1 << 20;   // larger broadcasts are copied by both sides

void copy(const Span& to, const std::byte* from, bool stream) {
  if (to.bytes > 0 && to.data != from) kernels::copy(to.data, from, to.bytes, stream);
}

// Stages the first two windows.
Task stage_first_windows(Phase& phase) {
  for (std::uint64_t window = 0; window < std::min<std::uint64_t>(2, phase.windows()); ++window) {
    Task stage = phase.stage(window);
    co_await stage;
  }
}

// After window `window` of the others was read: announces it, and stages the next window in its buffer.
Task advance_window(Phase& phase, std::uint64_t window) {
  phase.advance(&Counters::taken, window + 1);
  if (window + 2 >= phase.windows()) co_return;
  co_await phase.all(&Counters::taken, window + 1);
  Task stage = phase.stage(window + 2);
  co_await stage;
}

// Copies `pulls` from an open phase with staged first windows; `own` are this member's parts.
Task pull(Phase& phase, std::vector<Span> own, std::vector<Pull> pulls) {
  std::uint64_t windows = phase.windows(), written = 0;
  for (const Pull& pull : pulls) written += pull.to.bytes;
  const bool stream = written >= kStream;
  for (const Pull& pull : pulls) {
    if (pull.place == phase.self()) {
      copy(pull.to, own[pull.part].data, stream);
      continue;
    }
    Task met = phase.meet(pull.place);
    co_await met;
    const Slot& slot = phase.slot(pull.place);
    if (pull.part >= slot.parts || phase.entry(pull.place, pull.part).bytes != pull.to.bytes) {
      Task mismatch = phase.op().mismatch();
      co_await mismatch;
    }
    if (slot.exposure != Exposure::kStaged)
      copy(pull.to, phase.part(pull.place, pull.part, pull.to.bytes), stream);
    else
      windows = std::max(windows, phase.windows(pull.place));
  }
  for (std::uint64_t window = 0; window < windows; ++window) {
    for (const Pull& pull : pulls) {
      if (pull.place == phase.self() || !phase.stages(pull.place)) continue;
      std::uint64_t step = phase.step_bytes(pull.place), offset = window * step;
      if (window >= phase.windows(pull.place)) continue;
      Task ready = phase.staged(pull.place, window + 1);
      co_await ready;
      if (offset >= pull.to.bytes) continue;
      const Span to = slice(pull.to, offset, std::min(step, pull.to.bytes - offset));
      copy(to, phase.staging(pull.place, (window & 1) * kWindow + pull.part * step, to.bytes), stream);
    }
    Task next = advance_window(phase, window);
    co_await next;
  }
}

}  // namespace

Task exchange(Operation& op, std::vector<Span> parts, std::vector<Pull> pulls, int kept) {
  std::vector<Span> own = parts;
  Phase phase(op);
  Task open = phase.open(std::move(parts));
  co_await open;
  if (kept >= 0) phase.keep(static_cast<std::uint32_t>(kept));
  Task first = stage_first_windows(phase);
  co_await first;
  Task fetched = pull(phase, std::move(own), std::move(pulls));
  co_await fetched;
  Task close = phase.close();
  co_await close;
}

// The others copy from the root.  If both buffers are in shared memory, the idle root copies the last n-th.
Task shared_broadcast(Operation& op, Span data, int root) {
  Phase phase(op);
  const bool at_root = phase.self() == root, large = data.bytes >= kShared;
  const bool exposed = large && op.group().context().arena()->contains(data.data, data.bytes);
  std::vector<Span> own;
  if (at_root || exposed) own.push_back(data);
  Task open = phase.open(own);
  co_await open;
  Task first = stage_first_windows(phase);
  co_await first;
  auto [begin, end] = share(data.bytes, 1, phase.size(), phase.size() - 1);
  const Span last = slice(data, begin, end - begin);
  auto halved = [&](int place) {
    return large && phase.direct(root) && phase.direct(place) && phase.entry(place, 0).bytes == data.bytes;
  };
  if (at_root) {
    for (int place = 0; large && place < phase.size(); ++place) {
      if (place == root) continue;
      Task met = phase.meet(place);
      co_await met;
      if (halved(place) && !op.group().broken())
        kernels::copy(phase.part(place, 0, last.bytes, begin), last.data, last.bytes, data.bytes >= kStream);
    }
    if (phase.exposure() == Exposure::kDirect) phase.advance(&Counters::staged, 1);
    Task turned = pull(phase, std::move(own), {});
    co_await turned;
  } else {
    Task met = phase.meet(root);
    co_await met;
    const bool helped = exposed && halved(phase.self());
    std::vector<Pull> pulls(1, Pull{root, 0, data});
    if (!helped) {
      Task fetched = pull(phase, std::move(own), std::move(pulls));
      co_await fetched;
    } else if (phase.entry(root, 0).bytes != data.bytes) {
      Task mismatch = op.mismatch();
      co_await mismatch;
    } else {
      copy(slice(data, 0, begin), phase.part(root, 0, begin), data.bytes >= kStream);
      Task brought = phase.staged(root, 1);
      co_await brought;
    }
  }
  Task close = phase.close();
  co_await close;
}

Task reduce_parts(Operation& op, std::vector<Span> parts, std::vector<Reduce> reduces, bool partial) {
  const kernels::Reduction& reduction = op.request().reduction;
  const std::size_t item = itemsize(reduction.dtype);
  const std::size_t out_item = partial ? kernels::accumulator_size(reduction) : item;
  const std::vector<Span> own = parts;
  Phase phase(op);
  Task open = phase.open(std::move(parts));
  co_await open;
  for (const Reduce& job : reduces) phase.keep(job.part);
  Task first = stage_first_windows(phase);
  co_await first;
  Task met = phase.meet_all();
  co_await met;

  const int size = phase.size();
  std::vector<const void*> sources(size);
  auto run = [&](std::byte* to, std::uint64_t bytes) {
    void* destination = to;
    if (partial)
      kernels::reduce_partial(reduction, to, sources, bytes / item);
    else
      kernels::reduce(reduction, {&destination, 1}, sources, bytes / item);
  };
  bool any_staged = false;
  std::uint64_t windows = 0;
  for (int place = 0; place < size; ++place) {
    any_staged |= phase.stages(place);
    windows = std::max(windows, phase.windows(place));
    bool same = phase.slot(place).parts == own.size();
    for (std::size_t i = 0; same && i < own.size(); ++i)
      same = phase.entry(place, static_cast<std::uint32_t>(i)).bytes == own[i].bytes;
    if (same) continue;
    Task mismatch = op.mismatch();
    co_await mismatch;
  }
  if (!any_staged) {
    for (const Reduce& job : reduces) {
      for (int place = 0; place < size; ++place)
        sources[place] = phase.part(place, job.part, own[job.part].bytes);
      run(job.to, own[job.part].bytes);
    }
  }
  const std::uint64_t step = phase.step_bytes(phase.self());
  for (std::uint64_t window = 0; window < windows; ++window) {
    for (int place = 0; place < size; ++place) {
      if (!phase.stages(place) || place == phase.self()) continue;
      Task ready = phase.staged(place, window + 1);
      co_await ready;
    }
    for (const Reduce& job : reduces) {
      std::uint64_t offset = window * step, bytes = own[job.part].bytes;
      if (offset >= bytes) continue;
      const std::uint64_t length = std::min(step, bytes - offset);
      for (int place = 0; place < size; ++place)
        sources[place] = place == phase.self() ? own[job.part].data + offset
                         : phase.stages(place)
                             ? phase.staging(place, (window & 1) * kWindow + job.part * step, length)
                             : phase.part(place, job.part, length, offset);
      run(job.to + offset / item * out_item, length);
    }
    Task next = advance_window(phase, window);
    co_await next;
  }
  Task close = phase.close();
  co_await close;
}

Task meet(Operation& op) {
  Phase phase(op);
  Task open = phase.open({});
  co_await open;
  Task met = phase.meet_all();
  co_await met;
  Task close = phase.close();
  co_await close;
}

}  // namespace shoal::collectives
