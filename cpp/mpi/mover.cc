#include "mpi/mover.h"

#include <algorithm>
#include <stdexcept>

#include "collectives/collectives.h"
#include "engine/group.h"
#include "kernels/reduce.h"

namespace shoal::mpi {
namespace {

// Bytes up to which a rank receives the inputs of all others and reduces them; and those in an all-reduce by
// messages, whose two steps cost less than two collectives.
constexpr std::uint64_t kSmallBytes = 64 << 10, kSmallByMessages = 16 << 10;
// Bytes of each rank's part that are reduced at a time.
constexpr std::size_t kPieceBytes = 1 << 20;
// Maximum bytes of temporary memory that a lane keeps for its next operation.
constexpr std::size_t kKeptBytes = 64 << 20;

std::size_t item_of(const Request& request) { return itemsize(request.reduction.dtype); }

struct Finished {
  Library& library;
  Call& call;
  bool operator()() { return library.complete(call); }
  void check() const {
    if (!call.failure.empty()) throw MoverFailed(call.failure);
  }
};

auto finished(Operation& op, Library& library, Call& call) { return op.poll_until(Finished{library, call}); }

}  // namespace

// Temporary memory of an operation; kept until the process ends if the operation is abandoned.
class MpiMover::Scratch {
 public:
  // `lane`: takes the memory that it keeps if that is enough, and leaves the memory there; null: neither.
  Scratch(Operation& op, LaneState* lane, std::size_t bytes) : op_(op), lane_(lane), bytes_(bytes) {
    if (lane != nullptr && lane->kept && lane->kept_bytes >= bytes) {
      memory_ = std::move(lane->kept);
      bytes_ = std::exchange(lane->kept_bytes, 0);
    } else {
      memory_.reset(new std::byte[bytes]);
    }
  }
  ~Scratch() {
    if (op_.abandoned()) {
      keep_forever(std::move(memory_));
    } else if (lane_ != nullptr && bytes_ > lane_->kept_bytes && bytes_ <= kKeptBytes) {
      lane_->kept = std::move(memory_);
      lane_->kept_bytes = bytes_;
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::byte* data() const { return memory_.get(); }

 private:
  Operation& op_;
  LaneState* lane_;
  std::size_t bytes_;
  std::unique_ptr<std::byte[]> memory_;
};

// The spans of all ranks as parts in one memory: that of a single span, which stands for equal parts, or
// temporary memory.
class MpiMover::Joined {
 public:
  Joined(Operation& op, LaneState* lane, const std::vector<Span>& spans, std::size_t ranks, Handle type)
      : spans_(spans), room_(op, lane, spans.size() > 1 ? total(spans) : 0) {
    std::byte* const data = spans.size() == 1 ? spans[0].data : room_.data();
    const std::size_t item = item_of(op.request());
    Counts counts;
    for (const Span& part : collectives::parts_of(spans, static_cast<int>(ranks)))
      counts.push_back(part.bytes / item);
    parts_ = {data, counts, starts_of(counts), type, item};
  }
  const Parts& parts() const { return parts_; }
  void pack() { copy_all(true); }
  void unpack() { copy_all(false); }

 private:
  void copy_all(bool to_room) {
    if (spans_.size() < 2) return;
    std::byte* at = room_.data();
    for (const Span& span : spans_) {
      const Span room{at, span.bytes};
      to_room ? collectives::copy(room, span) : collectives::copy(span, room);
      at += span.bytes;
    }
  }

  const std::vector<Span>& spans_;
  Scratch room_;
  Parts parts_;
};

MpiMover::MpiMover(std::shared_ptr<Library> library, Options options)
    : library_(std::move(library)),
      options_(std::move(options)),
      rank_(options_.rank),
      size_(static_cast<std::size_t>(options_.size)),
      self_(static_cast<std::size_t>(options_.rank)) {
  for (Handle comm : options_.comms) lanes_.push_back({comm, nullptr});
  for (int dtype = 0; dtype < kDTypeCount; ++dtype)
    if (!options_.types.contains(itemsize(static_cast<DType>(dtype))))
      throw std::invalid_argument("no datatype of MPI for the elements of a dtype");
}

Task MpiMover::move(Operation& op) {
  LaneState& lane = lanes_[op.request().channel % lanes_.size()];
  switch (op.request().kind) {
    case Kind::kAllReduce:
      return all_reduce(op, lane);
    case Kind::kReduce:
      return reduce(op, lane);
    case Kind::kBroadcast:
      return broadcast(op, lane);
    case Kind::kAllGather:
      return all_gather(op, lane);
    case Kind::kGather:
      return gather(op, lane);
    case Kind::kScatter:
      return scatter(op, lane);
    case Kind::kReduceScatter:
      return reduce_scatter(op, lane);
    default:
      return all_to_all(op, lane);
  }
}

Task MpiMover::all_reduce(Operation& op, LaneState& lane) {
  const Request& request = op.request();
  const Span x = request.out[0];
  const std::size_t item = item_of(request);
  const std::uint64_t count = x.bytes / item;
  if (const MpiReduction* reduction = reduction_of(request)) {
    Call call(op);
    library_->all_reduce({x.data, count, reduction->type}, reduction->op, lane.comm, call);
    auto done = finished(op, *library_, call);
    co_await done;
    divide(request, *reduction, x.data, count);
    co_return;
  }
  if (is_small(x.bytes, options_.exchanges ? kSmallByMessages : kSmallBytes)) {
    Scratch gathered(op, &lane, x.bytes * size_);
    const Counts counts(size_, count);
    Call call(op);
    begin_all_gather(lane, x, {gathered.data(), counts, starts_of(counts), type_of(request), item}, call);
    auto done = finished(op, *library_, call);
    co_await done;
    reduce_gathered(request, gathered.data(), x);
    co_return;
  }
  const Counts counts = shares(count, item);
  const Parts parts{x.data, counts, starts_of(counts), type_of(request), item};
  Task reduced = reduce_scatter_into(op, lane, x, counts, x.data + parts.starts[self_] * item);
  co_await reduced;
  Call call(op);
  begin_all_gather(lane, parts.of(self_), parts, call);
  auto done = finished(op, *library_, call);
  co_await done;
}

Task MpiMover::reduce(Operation& op, LaneState& lane) {
  const Request& request = op.request();
  const Span x = request.in[0];
  const std::size_t item = item_of(request);
  const std::uint64_t count = x.bytes / item;
  const int root = request.root;
  const bool at_root = rank_ == root;
  if (const MpiReduction* reduction = reduction_of(request)) {
    Call call(op);
    library_->reduce({x.data, count, reduction->type}, reduction->op, root, at_root, lane.comm, call);
    auto done = finished(op, *library_, call);
    co_await done;
    if (at_root) divide(request, *reduction, x.data, count);
    co_return;
  }
  const Handle type = type_of(request);
  if (is_small(x.bytes, kSmallBytes)) {
    Scratch gathered(op, &lane, at_root ? x.bytes * size_ : 0);
    const Counts counts(size_, count);
    const Parts to{gathered.data(), counts, starts_of(counts), type, item};
    Call call(op);
    begin_gather(lane, x, to, root, call);
    auto done = finished(op, *library_, call);
    co_await done;
    if (!at_root) co_return;
    reduce_gathered(request, gathered.data(), x);
    co_return;
  }
  const Counts counts = shares(count, item);
  const Parts parts{x.data, counts, starts_of(counts), type, item};
  // Only the root's tensor may change.
  Scratch part(op, nullptr, at_root ? 0 : counts[self_] * item);
  std::byte* mine = at_root ? x.data + parts.starts[self_] * item : part.data();
  Task reduced = reduce_scatter_into(op, lane, x, counts, mine);
  co_await reduced;
  Call call(op);
  begin_gather(lane, {mine, counts[self_] * item}, parts, root, call);
  auto done = finished(op, *library_, call);
  co_await done;
}

Task MpiMover::broadcast(Operation& op, LaneState& lane) {
  const Request& request = op.request();
  const Span x = request.out[0];
  const std::size_t root = static_cast<std::size_t>(request.root);
  const std::uint64_t count = x.bytes / item_of(request);
  Call call(op);
  if (options_.exchanges) {
    Parts from = none_of(x.data, type_of(request), item_of(request)), to = from;
    if (self_ == root)
      from.counts = Counts(size_, count);
    else
      to.counts[root] = count;
    begin_all_to_all(lane, std::move(from), std::move(to), call);
  } else {
    library_->broadcast({x.data, count, type_of(request)}, request.root, lane.comm, call);
  }
  auto done = finished(op, *library_, call);
  co_await done;
}

Task MpiMover::all_gather(Operation& op, LaneState& lane) {
  const Request& request = op.request();
  Joined to(op, &lane, request.out, size_, type_of(request));
  Call call(op);
  begin_all_gather(lane, request.in[0], to.parts(), call);
  auto done = finished(op, *library_, call);
  co_await done;
  to.unpack();
}

Task MpiMover::gather(Operation& op, LaneState& lane) {
  const Request& request = op.request();
  Joined to(op, &lane, request.out, size_, type_of(request));
  Call call(op);
  begin_gather(lane, request.in[0], to.parts(), request.root, call);
  auto done = finished(op, *library_, call);
  co_await done;
  to.unpack();
}

Task MpiMover::scatter(Operation& op, LaneState& lane) {
  const Request& request = op.request();
  const bool at_root = rank_ == request.root;
  const Span y = request.out[0];
  const Handle type = type_of(request);
  const std::size_t item = item_of(request);
  Joined from(op, &lane, request.in, size_, type);
  if (at_root) from.pack();
  Call call(op);
  if (!options_.exchanges) {
    library_->scatter_parts(at_root ? &from.parts() : nullptr, {y.data, y.bytes / item, type}, request.root,
                            lane.comm, call);
  } else if (at_root) {
    begin_all_to_all(lane, from.parts(), none_of(y.data, type, item), call);
    collectives::copy(y, from.parts().of(self_));
  } else {
    Parts to = none_of(y.data, type, item);
    to.counts[static_cast<std::size_t>(request.root)] = y.bytes / item;
    begin_all_to_all(lane, none_of(nullptr, type, item), std::move(to), call);
  }
  auto done = finished(op, *library_, call);
  co_await done;
}

Task MpiMover::reduce_scatter(Operation& op, LaneState& lane) {
  const Request& request = op.request();
  const std::size_t item = item_of(request);
  const Span y = request.out[0];
  Joined from(op, nullptr, request.in, size_, type_of(request));  // the lane's memory is for received parts
  from.pack();
  const Counts& counts = from.parts().counts;
  const Span x{static_cast<std::byte*>(from.parts().data), total(request.in)};
  if (const MpiReduction* reduction = reduction_of(request)) {
    Call call(op);
    library_->reduce_scatter(x.data, {y.data, y.bytes / item, reduction->type}, counts, reduction->op,
                             lane.comm, call);
    auto done = finished(op, *library_, call);
    co_await done;
    divide(request, *reduction, y.data, y.bytes / item);
    co_return;
  }
  Task reduced = reduce_scatter_into(op, lane, x, counts, y.data);
  co_await reduced;
}

Task MpiMover::all_to_all(Operation& op, LaneState& lane) {
  const Request& request = op.request();
  const Handle type = type_of(request);
  Joined from(op, nullptr, request.in, size_, type), to(op, nullptr, request.out, size_, type);
  const Counts& receives = to.parts().counts;
  // The meeting does not compare its sizes.
  Scratch sizes(op, &lane, 2 * size_ * sizeof(std::uint64_t));
  auto* sent = reinterpret_cast<std::uint64_t*>(sizes.data());
  std::ranges::copy(from.parts().counts, sent);
  sent[size_ + self_] = sent[self_];  // which an exchange does not send
  {
    const Counts one(size_, 1), starts = starts_of(one);
    const Handle of_size = options_.types.at(sizeof *sent);
    Call call(op);
    if (options_.exchanges)
      begin_all_to_all(lane, {sent, one, starts, of_size, sizeof *sent},
                       {sent + size_, one, starts, of_size, sizeof *sent}, call);
    else
      library_->all_to_all(sent, sent + size_, of_size, lane.comm, call);
    auto done = finished(op, *library_, call);
    co_await done;
  }
  for (std::size_t rank = 0; rank < size_; ++rank) {
    if (sent[size_ + rank] == receives[rank]) continue;
    const std::string name = "rank " + std::to_string(rank);
    op.group().fail({ErrorCode::kMismatch,
                     "all_to_all on rank " + std::to_string(rank_) + ": " + name + " sends " +
                         std::to_string(sent[size_ + rank]) + " elements, but the output for its part has " +
                         std::to_string(receives[rank]),
                     {static_cast<int>(rank)}},
                    true);
    auto never = op.never();
    co_await never;
  }
  from.pack();
  Call call(op);
  begin_all_to_all(lane, from.parts(), to.parts(), call);
  collectives::copy(to.parts().of(self_), from.parts().of(self_));
  auto done = finished(op, *library_, call);
  co_await done;
  to.unpack();
}

// Sends part i of `x` to rank i, and reduces this rank's part of all ranks into `mine`; in pieces, so that
// their reduction finds what was received in a cache.
Task MpiMover::reduce_scatter_into(Operation& op, LaneState& lane, Span x, const Counts& counts,
                                   std::byte* mine) {
  const Request& request = op.request();
  const std::size_t item = item_of(request);
  const std::uint64_t step = kPieceBytes / item, longest = std::ranges::max(counts);
  const Counts starts = starts_of(counts);
  Scratch gathered(op, &lane, std::min(step, counts[self_]) * item * (size_ - 1));
  for (std::uint64_t at = 0; at < longest; at += step) {
    auto piece_of = [&](std::size_t rank) { return std::min(step, std::max(counts[rank], at) - at); };
    const std::uint64_t own = piece_of(self_);
    Parts from{x.data, {}, {}, type_of(request), item};
    for (std::size_t rank = 0; rank < size_; ++rank) {
      from.counts.push_back(piece_of(rank));
      from.starts.push_back(starts[rank] + std::min(at, counts[rank]));
    }
    Parts to{gathered.data(), Counts(size_, own), {}, from.type, item};
    to.counts[self_] = 0;
    to.starts = starts_of(to.counts);
    {
      Call call(op);
      begin_all_to_all(lane, from, to, call);
      auto done = finished(op, *library_, call);
      co_await done;
    }
    std::vector<const void*> parts;
    for (std::size_t rank = 0; rank < size_; ++rank)
      parts.push_back(rank == self_ ? x.data + from.starts[rank] * item
                                    : gathered.data() + to.starts[rank] * item);
    reduce_parts(request, parts, mine + std::min(at, counts[self_]) * item, own);
  }
}

// No part for any rank; all that are added begin at `data`.
Parts MpiMover::none_of(void* data, Handle type, std::size_t item) const {
  return {data, Counts(size_, 0), Counts(size_, 0), type, item};
}

// Sends part i of `from` to rank i, and receives part i of `to` from it; not this rank's own.
void MpiMover::begin_all_to_all(LaneState& lane, Parts from, Parts to, Call& call) const {
  from.counts[self_] = to.counts[self_] = 0;
  if (options_.exchanges)
    library_->exchange(from, to, lane.comm, call);
  else
    library_->all_to_all_parts(from, to, lane.comm, call);
}

// Sends this rank's part to all others, and receives theirs; copies its own into its place.
void MpiMover::begin_all_gather(LaneState& lane, Span own, const Parts& parts, Call& call) const {
  const Span place = parts.of(self_);
  if (options_.exchanges) {
    Parts from = none_of(own.data, parts.type, parts.item);
    from.counts = Counts(size_, parts.counts[self_]);
    begin_all_to_all(lane, std::move(from), parts, call);
    collectives::copy(place, own);
  } else {
    collectives::copy(place, own);
    library_->all_gather(parts, lane.comm, call);
  }
}

// Sends this rank's part to the root, which copies its own into its place; `parts` are those of the root.
void MpiMover::begin_gather(LaneState& lane, Span own, const Parts& parts, int root, Call& call) const {
  const Parts none = none_of(nullptr, parts.type, parts.item);
  const std::uint64_t count = own.bytes / parts.item;
  if (rank_ == root) {
    collectives::copy(parts.of(self_), own);
    if (options_.exchanges)
      begin_all_to_all(lane, none, parts, call);
    else
      library_->gather_parts(nullptr, &parts, root, lane.comm, call);
  } else if (options_.exchanges) {
    Parts from = none;
    from.data = own.data;
    from.counts[static_cast<std::size_t>(root)] = count;
    begin_all_to_all(lane, std::move(from), none, call);
  } else {
    const Whole from{own.data, count, parts.type};
    library_->gather_parts(&from, nullptr, root, lane.comm, call);
  }
}

const MpiReduction* MpiMover::reduction_of(const Request& request) const {
  auto found = options_.reductions.find(
      {static_cast<int>(request.reduction.dtype), static_cast<int>(request.reduction.op)});
  return found == options_.reductions.end() ? nullptr : &found->second;
}

Handle MpiMover::type_of(const Request& request) const { return options_.types.at(item_of(request)); }

bool MpiMover::is_small(std::uint64_t bytes, std::uint64_t limit) const {
  return bytes * (size_ - 1) <= limit;
}

// The number of elements that each rank reduces.
Counts MpiMover::shares(std::uint64_t count, std::size_t item) const {
  Counts counts;
  for (std::size_t rank = 0; rank < size_; ++rank) {
    auto [first, last] = collectives::share(count, item, static_cast<int>(size_), static_cast<int>(rank));
    counts.push_back(last - first);
  }
  return counts;
}

// Reduces the inputs of all ranks, which follow one another.
void MpiMover::reduce_gathered(const Request& request, const std::byte* gathered, Span to) const {
  std::vector<const void*> parts;
  for (std::size_t rank = 0; rank < size_; ++rank) parts.push_back(gathered + rank * to.bytes);
  reduce_parts(request, parts, to.data, to.bytes / item_of(request));
}

void MpiMover::reduce_parts(const Request& request, const std::vector<const void*>& parts, void* to,
                            std::uint64_t count) const {
  kernels::reduce(request.reduction, {&to, 1}, parts, count);
}

void MpiMover::divide(const Request& request, const MpiReduction& reduction, void* data,
                      std::uint64_t count) const {
  const void* from = data;
  if (reduction.averages) kernels::reduce(request.reduction, {&data, 1}, {&from, 1}, count);
}

}  // namespace shoal::mpi
