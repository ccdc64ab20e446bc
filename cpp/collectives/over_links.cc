// Collectives as point-to-point messages: across hosts, and for operations issued in callbacks.
//
// One owner reduces each element, in rank order, so that results are equal on all ranks.

#include <algorithm>
#include <deque>
#include <memory>
#include <numeric>

#include "collectives/members.h"

namespace shoal::collectives {
namespace {

constexpr std::uint32_t kSets = 4;  // number of pieces in flight

Members all_members(const Group& group) {
  std::vector<int> ranks(group.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return {std::move(ranks), group.rank()};
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
  co_await op.begun();
  if (flow == Flow::kAll || rank == root) copy(pick(theirs, rank), pick(mine, rank));
  Task done = messages.finish();
  co_await done;
}

// Small all-reduce and reduce: sends everything to everyone (or the root), which reduces in rank order.
Task reduce_at_once(Operation& op, Span data, int root) {
  const Request& request = op.request();
  const int size = op.group().size(), rank = op.group().rank();
  const bool reduces = root < 0 || rank == root;
  const auto room = op.scratch(reduces ? data.bytes * size : 0);
  std::vector<Span> theirs;
  for (int i = 0; i < size && reduces; ++i) theirs.push_back({room.get() + i * data.bytes, data.bytes});
  std::vector<Span> mine(1, data);
  Task exchange = direct(op, mine, theirs, root < 0 ? Flow::kAll : Flow::kToRoot, root);
  co_await exchange;
  if (!reduces) co_return;
  std::vector<const void*> sources;
  for (const Span& span : theirs) sources.push_back(span.data);
  void* to = data.data;
  kernels::reduce(request.reduction, {&to, 1}, sources, data.bytes / itemsize(request.reduction.dtype));
}

// Direct-exchange reduce-scatter: part i is sent to rank i, which reduces its inputs piece by piece into
// `out`.  With `spread`, each finished piece is sent immediately to the same slice of all other ranks
// (all-reduce) or of the root (reduce).
enum class Spread { kNone, kAll, kRoot };

Task reduce_scatter(Operation& op, std::vector<Span> parts, Span out, Spread spread, int root) {
  const kernels::Reduction& reduction = op.request().reduction;
  const std::size_t item = itemsize(reduction.dtype);
  const int size = op.group().size(), rank = op.group().rank();
  const Span mine = parts[rank];
  auto piece = [&](const Span& whole, std::uint32_t index) {
    std::uint64_t offset = index * kPiece;
    return slice(whole, offset, std::min(kPiece, whole.bytes - offset));
  };
  constexpr std::uint32_t kResults = 1u << 30;  // steps of finished pieces
  const std::uint32_t own = pieces_of(mine.bytes);
  // Several sets of buffers: some are filled while one is reduced.
  const std::uint64_t stride = std::min(kPiece, mine.bytes);
  const auto room = op.scratch(std::min(kSets, own) * stride * size);
  auto buffer = [&](std::uint32_t index, int from) {
    return room.get() + (index % kSets * size + from) * stride;
  };

  Messages results(op);
  if (spread == Spread::kAll || (spread == Spread::kRoot && rank == root))
    for (int from = 0; from < size; ++from) {
      const Span& slot = parts[from];
      for (std::uint32_t i = 0; from != rank && i < pieces_of(slot.bytes); ++i)
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
      const Span& part = parts[to];
      for (std::uint32_t p = index; p < std::min(end, pieces_of(part.bytes)); ++p)
        inputs.send(to, p, piece(part, p).data, piece(part, p).bytes);
      if (part.bytes == 0 && index == 0) inputs.send(to, 0, nullptr, 0);  // still carries the fingerprint
    }
  };
  constexpr std::uint32_t kAll = ~0u;
  // A piece is sent when its receiver, which proceeds at about the same pace, probably has room for it.
  for (std::uint32_t index = 0; index < std::min(kSets, own); ++index) expect(index);
  offer(0, own > kSets ? kSets : kAll);
  std::vector<const void*> sources(size);
  for (std::uint32_t index = 0; index < own; ++index) {
    Task arrived = arrivals.front().finish_receives();
    co_await arrived;
    arrivals.pop_front();
    Span from = piece(mine, index), to = piece(out, index);
    for (int r = 0; r < size; ++r) sources[r] = r == rank ? from.data : buffer(index, r);
    void* destination = to.data;
    kernels::reduce(reduction, {&destination, 1}, sources, from.bytes / item);
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
  Span out = parts[rank];
  std::shared_ptr<std::byte> room;
  if (root >= 0 && rank != root) {  // the input must not change
    room = op.scratch(out.bytes);
    out.data = room.get();
  }
  Task work = reduce_scatter(op, parts, out, root < 0 ? Spread::kAll : Spread::kRoot, root);
  co_await work;
}

// All-reduce and reduce in a logarithmic number of steps.
Task reduce_in_steps(Operation& op, Span data, Algorithm algorithm, int root) {
  const kernels::Reduction& reduction = op.request().reduction;
  const std::uint64_t elements = data.bytes / itemsize(reduction.dtype);
  co_await op.begun();
  const auto partial = op.scratch(elements * kernels::accumulator_size(reduction));
  const void* from = data.data;
  kernels::reduce_partial(reduction, partial.get(), {&from, 1}, elements);
  const Members members = all_members(op.group());
  Task work = reduce_partials(op, members, algorithm, partial.get(), elements, data.data, root, 0);
  co_await work;
}

Task reduce_scatter_in_steps(Operation& op, Algorithm algorithm, std::vector<Span> parts, Span out) {
  const kernels::Reduction& reduction = op.request().reduction;
  const std::size_t item = itemsize(reduction.dtype), wide = kernels::accumulator_size(reduction);
  co_await op.begun();
  Edges edges(1, 0);
  for (const Span& part : parts) edges.push_back(edges.back() + part.bytes / item);
  const auto partial = op.scratch(edges.back() * wide);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const void* from = parts[i].data;
    kernels::reduce_partial(reduction, partial.get() + edges[i] * wide, {&from, 1}, parts[i].bytes / item);
  }
  const Members members = all_members(op.group());
  Task work = scatter_partials(op, members, algorithm, partial.get(), edges, out.data, 0);
  co_await work;
}

Task all_gather_in_steps(Operation& op, Algorithm algorithm, Span mine, std::vector<Span> out) {
  co_await op.begun();
  const Members members = all_members(op.group());
  const int self = members.self();
  Edges edges(1, 0);
  bool adjacent = true;  // otherwise blocks are collected in one buffer, as a message has one address
  for (const Span& part : out) {
    adjacent &= part.data == out[0].data + edges.back();
    edges.push_back(edges.back() + part.bytes);
  }
  std::shared_ptr<std::byte> room;
  if (!adjacent) room = op.scratch(edges.back());
  std::byte* data = adjacent ? out[0].data : room.get();
  copy({data + edges[self], mine.bytes}, mine);
  Task work = gather_blocks(op, members, algorithm, data, edges, 0);
  co_await work;
  for (std::size_t i = 0; i < out.size() && !adjacent; ++i) copy(out[i], {data + edges[i], out[i].bytes});
}

}  // namespace

Task over_links(Operation& op) {
  const Request& request = op.request();
  const int size = op.group().size(), root = request.root;
  std::vector<Span> in = parts_of(request.in, size), out = parts_of(request.out, size);
  const Kind kind = request.pattern();
  const bool reduces = kind == Kind::kAllReduce || kind == Kind::kReduce;
  const std::uint64_t bytes = reduces                    ? request.in[0].bytes
                              : kind == Kind::kAllGather ? total(out)
                                                         : total(in);
  const std::uint64_t wide = shoal::reduces(kind) ? bytes / itemsize(request.reduction.dtype) *
                                                        kernels::accumulator_size(request.reduction)
                                                  : bytes;
  const Algorithm algorithm = algorithm_for(op.group().algorithm(), kind, size, bytes, wide, true);
  switch (kind) {
    case Kind::kAllReduce:
    case Kind::kReduce: {
      const int to = kind == Kind::kReduce ? root : -1;
      if (algorithm != Algorithm::kDirect) return reduce_in_steps(op, request.in[0], algorithm, to);
      return bytes <= at_once_limit(size) ? reduce_at_once(op, request.in[0], to)
                                          : reduce_in_slices(op, request.in[0], to);
    }
    case Kind::kBarrier:
      return barrier(op, all_members(op.group()));
    case Kind::kBroadcast:
      return broadcast(op, all_members(op.group()), request.out[0], root);
    case Kind::kAllGather:
      if (algorithm != Algorithm::kDirect) return all_gather_in_steps(op, algorithm, request.in[0], out);
      return direct(op, request.in, out, Flow::kAll, -1);
    case Kind::kGather:
      return direct(op, request.in, out, Flow::kToRoot, root);
    case Kind::kScatter:
      return direct(op, in, request.out, Flow::kFromRoot, root);
    case Kind::kAllToAll:
      return direct(op, in, out, Flow::kAll, -1);
    default:
      if (algorithm != Algorithm::kDirect) return reduce_scatter_in_steps(op, algorithm, in, request.out[0]);
      return reduce_scatter(op, in, request.out[0], Spread::kNone, -1);
  }
}

}  // namespace shoal::collectives
