// Collectives as point-to-point messages: across hosts, and for operations issued in callbacks.
//
// One owner reduces each element, in rank order, so that results are equal on all ranks.

#include <algorithm>
#include <deque>
#include <memory>

#include "collectives/collectives.h"
#include "engine/messages.h"

namespace shoal::collectives {
namespace {

constexpr std::uint64_t kSmall = 32 * 1024;       // up to this size, all-reduce exchanges everything at once
constexpr std::uint64_t kSmallPair = 256 * 1024;  // for two ranks, which send equally much either way
constexpr std::uint64_t kPiece = kEager;          // longer slices are reduced piece by piece
constexpr std::uint32_t kSets = 4;                // number of pieces in flight

Task barrier(Operation& op) {
  // Dissemination (Hensgen, Finkel, Manber 1988): in round k, signal the rank at distance 2^k.
  const int size = op.group().size(), rank = op.group().rank();
  Messages messages(op);
  std::uint32_t step = 0;
  for (int distance = 1; distance < size; distance *= 2, ++step) {
    messages.send((rank + distance) % size, step, nullptr, 0);
    messages.receive((rank - distance + size) % size, step, nullptr, 0);
    Task round = messages.finish_receives();
    co_await round;
  }
  Task done = messages.finish();
  co_await done;
}

Task broadcast(Operation& op, Span data, int root) {
  // Binomial tree.
  const int size = op.group().size(), place = (op.group().rank() - root + size) % size;
  Messages messages(op);
  int reach = 1;
  while (reach <= place) reach *= 2;
  if (place != 0) {
    messages.receive((place - reach / 2 + root) % size, 0, data.data, data.bytes);
    Task arrived = messages.finish_receives();
    co_await arrived;
  }
  int top = 1;
  while (top < size) top *= 2;
  for (int distance = top / 2; distance >= reach; distance /= 2)
    if (place + distance < size) messages.send((place + distance + root) % size, 0, data.data, data.bytes);
  Task done = messages.finish();
  co_await done;
}

enum class Flow { kAll, kToRoot, kFromRoot };

// Every rank sends `mine[i]` to rank i and receives `theirs[i]` from it, or only the root does one of the
// two.  A list of one span is used for all ranks.
Task direct(Operation& op, std::vector<Span> mine, std::vector<Span> theirs, Flow flow, int root) {
  const int size = op.group().size(), rank = op.group().rank();
  auto pick = [](const std::vector<Span>& spans, int i) {
    return spans[spans.size() == 1 ? 0 : static_cast<std::size_t>(i)];
  };
  Messages messages(op);
  for (int i = 1; i < size; ++i) {
    int from = (rank - i + size) % size;
    bool comes = flow == Flow::kAll || (flow == Flow::kToRoot ? rank == root : from == root);
    if (comes) messages.receive(from, 0, pick(theirs, from).data, pick(theirs, from).bytes);
  }
  for (int i = 1; i < size; ++i) {
    int to = (rank + i) % size;
    bool goes = flow == Flow::kAll || (flow == Flow::kToRoot ? to == root : rank == root);
    if (goes) messages.send(to, 0, pick(mine, to).data, pick(mine, to).bytes);
  }
  auto begun = op.begun();
  co_await begun;
  if (flow == Flow::kAll || rank == root) copy(pick(theirs, rank), pick(mine, rank));
  Task done = messages.finish();
  co_await done;
}

// Small all-reduce and reduce: sends everything to everyone (or the root), which reduces in rank order.
Task reduce_at_once(Operation& op, Span data, int root) {
  const Request& request = op.request();
  const int size = op.group().size(), rank = op.group().rank();
  const bool reduces = root < 0 || rank == root;
  auto room = std::make_unique_for_overwrite<std::byte[]>(
      reduces ? data.bytes * static_cast<std::uint64_t>(size) : 0);
  std::vector<Span> theirs;
  for (int i = 0; i < size && reduces; ++i)
    theirs.push_back({room.get() + static_cast<std::uint64_t>(i) * data.bytes, data.bytes});
  std::vector<Span> mine(1, data);
  Task exchange = direct(op, mine, theirs, root < 0 ? Flow::kAll : Flow::kToRoot, root);
  co_await exchange;
  if (!reduces) co_return;
  std::vector<const void*> sources;
  for (const Span& span : theirs) sources.push_back(span.data);
  void* to = data.data;
  kernels::reduce(request.reduction, &to, 1, sources.data(), sources.size(),
                  data.bytes / itemsize(request.reduction.dtype), false);
}

// Direct-exchange reduce-scatter: part i is sent to rank i, which reduces its inputs piece by piece into
// `out`.  With `spread`, each finished piece is sent immediately to the same slice of all other ranks
// (all-reduce) or of the root (reduce).
enum class Spread { kNone, kAll, kRoot };

Task reduce_scatter(Operation& op, std::vector<Span> parts, Span out, Spread spread, int root) {
  const kernels::Reduction& reduction = op.request().reduction;
  const std::size_t item = itemsize(reduction.dtype);
  const int size = op.group().size(), rank = op.group().rank();
  const Span mine = parts[static_cast<std::size_t>(rank)];
  auto pieces = [&](std::uint64_t bytes) {
    return static_cast<std::uint32_t>((bytes + kPiece - 1) / kPiece);
  };
  auto piece = [&](const Span& whole, std::uint32_t index) {
    std::uint64_t offset = index * kPiece;
    return slice(whole, offset, std::min(kPiece, whole.bytes - offset));
  };
  constexpr std::uint32_t kResults = 1u << 30;  // steps of finished pieces
  const std::uint32_t own = pieces(mine.bytes);
  // Several sets of buffers: some are filled while one is reduced.
  const std::uint64_t stride = std::min(kPiece, mine.bytes);
  auto room = std::make_unique_for_overwrite<std::byte[]>(std::min(kSets, own) * stride *
                                                          static_cast<std::uint64_t>(size));
  auto buffer = [&](std::uint32_t index, int from) {
    return room.get() + (static_cast<std::uint64_t>(index % kSets) * static_cast<std::uint64_t>(size) +
                         static_cast<std::uint64_t>(from)) *
                            stride;
  };

  Messages results(op);
  if (spread == Spread::kAll || (spread == Spread::kRoot && rank == root))
    for (int from = 0; from < size; ++from) {
      const Span& slot = parts[static_cast<std::size_t>(from)];
      for (std::uint32_t i = 0; from != rank && i < pieces(slot.bytes); ++i)
        results.receive(from, kResults + i, piece(slot, i).data, piece(slot, i).bytes);
    }
  Messages inputs(op);
  for (int from = 0; mine.bytes == 0 && from < size; ++from)
    if (from != rank) inputs.receive(from, 0, nullptr, 0);
  std::deque<Messages> arrivals;  // one element per piece
  auto expect = [&](std::uint32_t index) {
    arrivals.emplace_back(op);
    for (int from = 0; from < size; ++from)
      if (from != rank) arrivals.back().receive(from, index, buffer(index, from), piece(mine, index).bytes);
  };
  // Parts may differ in size: pieces beyond the number of this rank's pieces are sent with the last.
  auto offer = [&](std::uint32_t index, std::uint32_t end) {
    for (int i = 1; i < size; ++i) {
      int to = (rank + i) % size;
      const Span& part = parts[static_cast<std::size_t>(to)];
      for (std::uint32_t p = index; p < std::min(end, pieces(part.bytes)); ++p)
        inputs.send(to, p, piece(part, p).data, piece(part, p).bytes);
      if (part.bytes == 0 && index == 0) inputs.send(to, 0, nullptr, 0);  // still carries the fingerprint
    }
  };
  constexpr std::uint32_t kAll = ~0u;
  // A piece is sent when its receiver, which proceeds at about the same pace, probably has room for it.
  for (std::uint32_t index = 0; index < std::min(kSets, own); ++index) expect(index);
  offer(0, own > kSets ? kSets : kAll);
  std::vector<const void*> sources(static_cast<std::size_t>(size));
  for (std::uint32_t index = 0; index < own; ++index) {
    Task arrived = arrivals.front().finish_receives();
    co_await arrived;
    arrivals.pop_front();
    Span from = piece(mine, index), to = piece(out, index);
    for (int r = 0; r < size; ++r)
      sources[static_cast<std::size_t>(r)] = r == rank ? from.data : buffer(index, r);
    void* destination = to.data;
    kernels::reduce(reduction, &destination, 1, sources.data(), sources.size(), from.bytes / item, false);
    for (int r = 0; r < size; ++r)
      if (r != rank && (spread == Spread::kAll || (spread == Spread::kRoot && r == root && rank != root)))
        results.send(r, kResults + index, to.data, to.bytes);
    const std::uint32_t next = index + kSets;
    if (next >= own) continue;
    expect(next);
    offer(next, next + 1 == own ? kAll : next + 1);
  }
  Task sent = inputs.finish();
  co_await sent;
  Task spread_out = results.finish();
  co_await spread_out;
}

Task reduce_in_slices(Operation& op, Span data, int root) {
  const std::size_t item = itemsize(op.request().reduction.dtype);
  const int size = op.group().size(), rank = op.group().rank();
  std::vector<Span> parts;
  for (int i = 0; i < size; ++i) {
    auto [first, last] = share(data.bytes / item, item, size, i);
    parts.push_back(slice(data, first * item, (last - first) * item));
  }
  Span out = parts[static_cast<std::size_t>(rank)];
  std::unique_ptr<std::byte[]> room;
  if (root >= 0 && rank != root) {  // the input must not change
    room = std::make_unique_for_overwrite<std::byte[]>(out.bytes);
    out.data = room.get();
  }
  Task work = reduce_scatter(op, parts, out, root < 0 ? Spread::kAll : Spread::kRoot, root);
  co_await work;
}

}  // namespace

Task over_links(Operation& op) {
  const Request& request = op.request();
  const int size = op.group().size(), root = request.root;
  std::vector<Span> in = parts_of(request.in, size), out = parts_of(request.out, size);
  switch (request.pattern()) {
    case Kind::kAllReduce:
    case Kind::kReduce: {
      int to = request.kind == Kind::kReduce ? root : -1;
      bool small = request.in[0].bytes <= (size == 2 ? kSmallPair : kSmall) ||
                   request.in[0].bytes < static_cast<std::uint64_t>(size) * 64;
      return small ? reduce_at_once(op, request.in[0], to) : reduce_in_slices(op, request.in[0], to);
    }
    case Kind::kBarrier:
      return barrier(op);
    case Kind::kBroadcast:
      return broadcast(op, request.out[0], root);
    case Kind::kAllGather:
      return direct(op, request.in, out, Flow::kAll, -1);
    case Kind::kGather:
      return direct(op, request.in, out, Flow::kToRoot, root);
    case Kind::kScatter:
      return direct(op, in, request.out, Flow::kFromRoot, root);
    case Kind::kAllToAll:
      return direct(op, in, out, Flow::kAll, -1);
    default:
      return reduce_scatter(op, in, request.out[0], Spread::kNone, -1);
  }
}

}  // namespace shoal::collectives
