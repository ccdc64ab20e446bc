#include "collectives/members.h"

#include <algorithm>
#include <bit>
#include <deque>
#include <memory>

namespace shoal::collectives {
namespace {

// The model's parameters as a number of bytes that a network transfers meanwhile, for TCP at 25 Gbit/s; the
// ratios for other networks are similar, see docs/algorithms.md.
constexpr double kLatency = 64 << 10;   // from the start of sending to the start of receiving
constexpr double kOverhead = 16 << 10;  // work for a message, besides its bytes
// The direct algorithms overlap their steps, and are preferred to others that save less than this share.
constexpr double kMargin = 0.2;

constexpr std::uint64_t kSmall = 32 * 1024;       // up to this size, all-reduce exchanges everything at once
constexpr std::uint64_t kSmallPair = 256 * 1024;  // for two members, which send equally much either way

int rounds_of(int members) { return std::bit_width(static_cast<unsigned>(members) - 1); }

// In whole cache lines if possible.
Edges equal_edges(std::uint64_t count, std::size_t item, int blocks) {
  Edges edges(1, 0);
  for (int i = 0; i < blocks; ++i) edges.push_back(share(count, item, blocks, i).second);
  return edges;
}

Edges scaled(Edges edges, std::uint64_t factor) {
  for (std::uint64_t& edge : edges) edge *= factor;
  return edges;
}

// A contiguous part of some blocks' data.
struct Segment {
  std::uint64_t first, last;
};

// `count` blocks from `first` on, where the last block is followed by the first one: one or two segments.
std::vector<Segment> segments(const Members& members, const Edges& edges, int first, int count) {
  const auto from = static_cast<std::size_t>(members.wrapped(first));
  const std::size_t blocks = edges.size() - 1;
  const std::size_t here = std::min(blocks - from, static_cast<std::size_t>(count));
  std::vector<Segment> found{{edges[from], edges[from + here]}};
  if (const std::size_t rest = static_cast<std::size_t>(count) - here; edges[rest] > 0)
    found.push_back({0, edges[rest]});
  // A message without data still has the call.
  if (found.size() == 2 && found[0].first == found[0].last) found.erase(found.begin());
  return found;
}

// The numbers of blocks that a member holds before each round of scatter_partials(), and 1: each half of the
// one before, rounded up.
std::vector<int> held_blocks(int members) {
  std::vector<int> held(1, members);
  while (held.back() > 1) held.push_back((held.back() + 1) / 2);
  return held;
}

// The last piece may be longer, and then needs a grant.  The number of a piece is in the step's upper bits.
// Steps themselves reach these after 4,096 blocks of 16 MB, when the messages whose numbers they repeat have
// long been received.
constexpr int kPieceBits = 24;
constexpr std::uint64_t kMostPieces = 64;

void in_pieces(std::uint64_t bytes, auto&& each) {
  std::uint64_t offset = 0, index = 0;
  do {
    const std::uint64_t length = index + 1 < kMostPieces ? std::min(kPiece, bytes - offset) : bytes - offset;
    each(static_cast<std::uint32_t>(index++ << kPieceBits), offset, length);
    offset += length;
  } while (offset < bytes);
}

// Memory for what one step after another receives.
class Room {
 public:
  explicit Room(Messages& messages) : messages_(messages) {}
  std::byte* of(std::uint64_t bytes) {
    if (bytes > bytes_ || memory_ == nullptr) memory_ = messages_.scratch(bytes);
    bytes_ = std::max(bytes, bytes_);
    return memory_;
  }

 private:
  Messages& messages_;
  std::byte* memory_ = nullptr;
  std::uint64_t bytes_ = 0;
};

void combine(const kernels::Reduction& reduction, std::byte* to, const std::byte* low, const std::byte* high,
             std::uint64_t count) {
  const void* sources[] = {low, high};
  kernels::combine_partials(reduction, to, sources, count);
}

void finish(const kernels::Reduction& reduction, std::byte* to, const std::byte* partial,
            std::uint64_t count) {
  const void* source = partial;
  kernels::finish_partials(reduction, to, {&source, 1}, count);
}

// Each member, or the one with the root, finishes a part of the results, for which all send it their partial
// ones.
Task reduce_directly(Operation& op, const Members& members, std::byte* partial, std::uint64_t elements,
                     std::byte* finished, int root, std::uint32_t step) {
  const kernels::Reduction& reduction = op.request().reduction;
  const std::size_t item = itemsize(reduction.dtype), wide = kernels::accumulator_size(reduction);
  const int size = members.size(), self = members.self();
  auto part_of = [&](int i) {
    if (root < 0) return share(elements, item, size, i);
    return std::pair<std::uint64_t, std::uint64_t>(0, i == root ? elements : 0);
  };
  auto [first, last] = part_of(self);
  const std::uint64_t length = (last - first) * wide;
  Messages inputs(op), results(op);
  std::byte* const room = inputs.scratch(length * size);
  for (int i = 0; i < size; ++i) {
    if (i == self) continue;
    const int peer = members.rank(i);
    if (root < 0 || self == root) receive_pieces(inputs, peer, step, room + i * length, length);
    auto [from, to] = part_of(i);
    if (root < 0 || i == root) send_pieces(inputs, peer, step, partial + from * wide, (to - from) * wide);
    if (root < 0) receive_pieces(results, peer, step + 1, finished + from * item, (to - from) * item);
  }
  Task arrived = inputs.finish_receives();
  co_await arrived;
  std::vector<const void*> sources;
  for (int i = 0; i < size; ++i) sources.push_back(i == self ? partial + first * wide : room + i * length);
  kernels::finish_partials(reduction, finished + first * item, sources, last - first);
  for (int i = 0; root < 0 && i < size; ++i)
    if (i != self)
      send_pieces(results, members.rank(i), step + 1, finished + first * item, (last - first) * item);
  Task sent = inputs.finish();
  co_await sent;
  Task spread = results.finish();
  co_await spread;
}

// All-reduce by recursive doubling (Thakur, Rabenseifner and Gropp 2005): in round k, pairs at distance 2^k
// exchange everything.  The members beyond a power of two have a partner that does it for them.
Task reduce_by_doubling(Operation& op, const Members& members, std::byte* partial, std::uint64_t elements,
                        std::byte* finished, std::uint32_t step) {
  const kernels::Reduction& reduction = op.request().reduction;
  const std::uint64_t bytes = elements * kernels::accumulator_size(reduction);
  const int size = members.size(), self = members.self();
  const int power = static_cast<int>(std::bit_floor(static_cast<unsigned>(size))), pairs = size - power;
  // The first 2 * pairs members form pairs of which the odd one takes part.
  auto member_of = [&](int place) { return members.rank(place < pairs ? 2 * place + 1 : place + pairs); };
  const bool paired = self < 2 * pairs;
  const std::uint32_t last = step + static_cast<std::uint32_t>(rounds_of(size)) + 1;
  Messages messages(op);
  auto receive = [&](int from, std::uint32_t number) {
    std::byte* const room = messages.scratch(bytes);  // for each message: what was received is also sent
    messages.receive(from, number, room, bytes);
    return room;
  };
  std::byte* current = partial;
  if (paired && self % 2 == 0) {
    messages.send(members.rank(self + 1), step, current, bytes);
    current = receive(members.rank(self + 1), last);
  } else {
    if (paired) {
      std::byte* const theirs = receive(members.rank(self - 1), step);
      Task arrived = messages.finish_receives();
      co_await arrived;
      combine(reduction, theirs, theirs, current, elements);
      current = theirs;
    }
    const int place = paired ? self / 2 : self - pairs;
    for (int distance = 1; distance < power; distance *= 2) {
      const int peer = member_of(place ^ distance);
      const std::uint32_t number = ++step;
      std::byte* const theirs = receive(peer, number);
      messages.send(peer, number, current, bytes);
      Task arrived = messages.finish_receives();
      co_await arrived;
      const bool low = (place & distance) == 0;  // the same order on both, so that results are equal
      combine(reduction, theirs, low ? current : theirs, low ? theirs : current, elements);
      current = theirs;
    }
    if (paired) messages.send(members.rank(self - 1), last, current, bytes);
  }
  Task done = messages.finish();
  co_await done;
  finish(reduction, finished, current, elements);
}

// Binomial tree.
Task reduce_by_tree(Operation& op, const Members& members, std::byte* partial, std::uint64_t elements,
                    std::byte* finished, int root, std::uint32_t step) {
  const kernels::Reduction& reduction = op.request().reduction;
  const std::uint64_t bytes = elements * kernels::accumulator_size(reduction);
  const int size = members.size(), place = members.wrapped(members.self() - root);
  Messages messages(op);
  Room received(messages);
  for (int distance = 1; distance < size; distance *= 2) {
    if ((place & distance) != 0) {
      messages.send(members.rank(root + place - distance), step, partial, bytes);
      break;
    }
    if (place + distance >= size) continue;
    std::byte* const room = received.of(bytes);
    messages.receive(members.rank(root + place + distance), step, room, bytes);
    Task arrived = messages.finish_receives();
    co_await arrived;
    combine(reduction, partial, partial, room, elements);
  }
  Task done = messages.finish();
  co_await done;
  if (place == 0) finish(reduction, finished, partial, elements);
}

// Binomial tree: the root receives the block of every member.
Task gather_by_tree(Operation& op, const Members& members, std::byte* data, const Edges& bytes, int root,
                    std::uint32_t step) {
  const int size = members.size(), place = members.wrapped(members.self() - root);
  Messages messages(op);
  for (int distance = 1; distance < size; distance *= 2) {
    const bool sends = (place & distance) != 0;
    if (!sends && place + distance >= size) continue;
    const int first = sends ? place : place + distance;
    const int peer = members.rank(root + (sends ? place - distance : first));
    std::uint32_t number = step;
    for (auto [from, to] : segments(members, bytes, root + first, std::min(distance, size - first))) {
      if (sends)
        send_pieces(messages, peer, number, data + from, to - from);
      else
        receive_pieces(messages, peer, number, data + from, to - from);
      ++number;
    }
    if (sends) break;
    Task arrived = messages.finish_receives();
    co_await arrived;
  }
  Task done = messages.finish();
  co_await done;
}

// Träff 2023, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms": before a round a member holds
// partial results of the `held` blocks from its own on; it sends the second half to the member whose own
// block is the first one of that half.
Task scatter_by_halving(Operation& op, const Members& members, std::byte* partial, const Edges& elements,
                        std::byte* finished, std::uint32_t step) {
  const kernels::Reduction& reduction = op.request().reduction;
  const std::size_t wide = kernels::accumulator_size(reduction);
  const int self = members.self();
  const std::vector<int> held = held_blocks(members.size());
  Messages messages(op);
  Room received(messages);
  for (std::size_t round = 0; round + 1 < held.size(); ++round, step += 2) {
    const int kept = held[round + 1], sent = held[round] - kept;
    const auto mine = segments(members, elements, self, sent);
    std::uint64_t total = 0;
    for (auto [first, last] : mine) total += last - first;
    std::byte* const room = received.of(total * wide);
    std::uint64_t at = 0;
    std::uint32_t number = step;
    for (auto [first, last] : mine) {
      receive_pieces(messages, members.rank(self - kept), number++, room + at, (last - first) * wide);
      at += (last - first) * wide;
    }
    number = step;
    for (auto [first, last] : segments(members, elements, self + kept, sent))
      send_pieces(messages, members.rank(self + kept), number++, partial + first * wide,
                  (last - first) * wide);
    Task arrived = messages.finish_receives();
    co_await arrived;
    at = 0;
    for (auto [first, last] : mine) {
      std::byte* own = partial + first * wide;
      combine(reduction, own, own, room + at, last - first);
      at += (last - first) * wide;
    }
  }
  Task done = messages.finish();
  co_await done;
  finish(reduction, finished, partial + elements[self] * wide, elements[self + 1] - elements[self]);
}

// The same rounds in the opposite order and direction (Bruck and others 1997).
Task gather_by_doubling(Operation& op, const Members& members, std::byte* data, const Edges& bytes,
                        std::uint32_t step) {
  const int self = members.self();
  const std::vector<int> held = held_blocks(members.size());
  Messages messages(op);
  for (std::size_t round = held.size() - 1; round-- > 0; step += 2) {
    const int kept = held[round + 1], moved = held[round] - kept;
    std::uint32_t number = step;
    for (auto [first, last] : segments(members, bytes, self + kept, moved))
      receive_pieces(messages, members.rank(self + kept), number++, data + first, last - first);
    number = step;
    for (auto [first, last] : segments(members, bytes, self, moved))
      send_pieces(messages, members.rank(self - kept), number++, data + first, last - first);
    Task arrived = messages.finish_receives();
    co_await arrived;
  }
  Task done = messages.finish();
  co_await done;
}

// Patarasuk and Yuan 2009: each block goes around the ring; every member adds its own to it, at last the one
// that finishes it.
Task scatter_in_ring(Operation& op, const Members& members, std::byte* partial, const Edges& elements,
                     std::byte* finished, std::uint32_t step) {
  const kernels::Reduction& reduction = op.request().reduction;
  const std::size_t wide = kernels::accumulator_size(reduction);
  const int self = members.self();
  auto block = [&](int member) {
    const int i = members.wrapped(member);
    return Segment{elements[i], elements[i + 1]};
  };
  Messages messages(op);
  Room received(messages);
  for (int round = 1; round < members.size(); ++round, ++step) {
    const auto [first, last] = block(self - round);
    send_pieces(messages, members.rank(self + 1), step, partial + first * wide, (last - first) * wide);
    const auto [begin, end] = block(self - round - 1);
    std::byte* const room = received.of((end - begin) * wide);
    receive_pieces(messages, members.rank(self - 1), step, room, (end - begin) * wide);
    Task arrived = messages.finish_receives();
    co_await arrived;
    std::byte* own = partial + begin * wide;
    combine(reduction, own, room, own, end - begin);
  }
  Task done = messages.finish();
  co_await done;
  const auto [first, last] = block(self);
  finish(reduction, finished, partial + first * wide, last - first);
}

Task gather_in_ring(Operation& op, const Members& members, std::byte* data, const Edges& bytes,
                    std::uint32_t step) {
  const int self = members.self();
  Messages messages(op);
  for (int round = 0; round + 1 < members.size(); ++round, ++step) {
    const int sent = members.wrapped(self - round);
    send_pieces(messages, members.rank(self + 1), step, data + bytes[sent], bytes[sent + 1] - bytes[sent]);
    const int next = members.wrapped(self - round - 1);
    receive_pieces(messages, members.rank(self - 1), step, data + bytes[next], bytes[next + 1] - bytes[next]);
    Task arrived = messages.finish_receives();
    co_await arrived;
  }
  Task done = messages.finish();
  co_await done;
}

// Each member reduces and finishes a block; then these are gathered.
Task reduce_in_blocks(Operation& op, const Members& members, Algorithm algorithm, std::byte* partial,
                      std::uint64_t elements, std::byte* finished, int root, std::uint32_t step) {
  const std::size_t item = itemsize(op.request().reduction.dtype);
  const Edges edges = equal_edges(elements, item, members.size());
  std::shared_ptr<std::byte> room;
  if (root >= 0 && members.self() != root) {
    room = op.scratch(elements * item);
    finished = room.get();
  }
  std::byte* block = finished + edges[members.self()] * item;
  Task scattered = scatter_partials(op, members, algorithm, partial, edges, block, step);
  co_await scattered;
  const Edges bytes = scaled(edges, item);
  Task gathered = root < 0 ? gather_blocks(op, members, algorithm, finished, bytes, step + kSteps / 2)
                           : gather_by_tree(op, members, finished, bytes, root, step + kSteps / 2);
  co_await gathered;
}

}  // namespace

void send_pieces(Messages& messages, int to, std::uint32_t step, const std::byte* data, std::uint64_t bytes) {
  in_pieces(bytes, [&](std::uint32_t number, std::uint64_t offset, std::uint64_t length) {
    messages.send(to, step | number, data + offset, length);
  });
}

void receive_pieces(Messages& messages, int from, std::uint32_t step, std::byte* data, std::uint64_t bytes) {
  in_pieces(bytes, [&](std::uint32_t number, std::uint64_t offset, std::uint64_t length) {
    messages.receive(from, step | number, data + offset, length);
  });
}

std::uint64_t at_once_limit(int members) {
  return std::max(members == 2 ? kSmallPair : kSmall, static_cast<std::uint64_t>(members) * 64 - 1);
}

Algorithm algorithm_for(Algorithm choice, Kind kind, int members, std::uint64_t bytes, std::uint64_t wide,
                        bool at_once) {
  const bool reduces_whole = kind == Kind::kAllReduce || kind == Kind::kReduce;
  if (members < 2 || (!reduces_whole && kind != Kind::kReduceScatter && kind != Kind::kAllGather))
    return Algorithm::kDirect;
  if (choice == Algorithm::kAuto) {
    const double others = members - 1, rounds = rounds_of(members), share = others / members;
    const auto narrow_bytes = static_cast<double>(bytes), wide_bytes = static_cast<double>(wide);
    const double round = kLatency + kOverhead;
    const bool folds = !std::has_single_bit(static_cast<unsigned>(members));
    double direct = 0, doubling = 0, halving = 0;
    if (!reduces_whole) {
      const bool gathers = kind == Kind::kAllGather;
      direct = kLatency + others * kOverhead + narrow_bytes * share;
      halving = rounds * round + (gathers ? narrow_bytes : wide_bytes) * share;
      doubling = halving;
    } else {
      const bool all = kind == Kind::kAllReduce;
      direct = at_once && bytes <= at_once_limit(members)
                   ? kLatency + others * (kOverhead + narrow_bytes)
                   : 2 * (kLatency + others * kOverhead) +
                         (at_once ? 2 * narrow_bytes : wide_bytes + narrow_bytes) * share;
      doubling = (rounds + (all && folds ? 1 : 0)) * (round + wide_bytes);
      halving = 2 * rounds * round + (wide_bytes + narrow_bytes) * share;
    }
    choice = doubling <= halving ? Algorithm::kDoubling : Algorithm::kHalving;
    if (direct * (1 - kMargin) <= std::min(doubling, halving)) choice = Algorithm::kDirect;
  }
  if (choice == Algorithm::kRing && members > static_cast<int>(kSteps / 2)) return Algorithm::kHalving;
  return choice == Algorithm::kDoubling && !reduces_whole ? Algorithm::kHalving : choice;
}

Task reduce_partials(Operation& op, const Members& members, Algorithm algorithm, std::byte* partial,
                     std::uint64_t elements, std::byte* finished, int root, std::uint32_t step) {
  if (algorithm == Algorithm::kDirect)
    return reduce_directly(op, members, partial, elements, finished, root, step);
  op.has_steps = true;
  if (algorithm != Algorithm::kDoubling)
    return reduce_in_blocks(op, members, algorithm, partial, elements, finished, root, step);
  return root < 0 ? reduce_by_doubling(op, members, partial, elements, finished, step)
                  : reduce_by_tree(op, members, partial, elements, finished, root, step);
}

Task scatter_partials(Operation& op, const Members& members, Algorithm algorithm, std::byte* partial,
                      const Edges& elements, std::byte* finished, std::uint32_t step) {
  op.has_steps = true;
  return (algorithm == Algorithm::kRing ? scatter_in_ring : scatter_by_halving)(op, members, partial,
                                                                                elements, finished, step);
}

Task gather_blocks(Operation& op, const Members& members, Algorithm algorithm, std::byte* data,
                   const Edges& bytes, std::uint32_t step) {
  op.has_steps = true;
  return (algorithm == Algorithm::kRing ? gather_in_ring : gather_by_doubling)(op, members, data, bytes,
                                                                               step);
}

Task barrier(Operation& op, Members members) {
  // Dissemination (Hensgen, Finkel, Manber 1988): in round k, signal the member at distance 2^k.
  Messages messages(op);
  std::uint32_t step = 0;
  for (int distance = 1; distance < members.size(); distance *= 2, ++step) {
    messages.send(members.rank(members.self() + distance), step, nullptr, 0);
    messages.receive(members.rank(members.self() - distance), step, nullptr, 0);
    Task round = messages.finish_receives();
    co_await round;
  }
  Task done = messages.finish();
  co_await done;
}

namespace {

// The root sends a part of the data to each other member, which sends it to all others (Barnett and others
// 1994: scatter and all-gather), piece by piece, so that both happen at the same time.
Task broadcast_in_parts(Operation& op, const Members& members, Span data, int root) {
  op.has_steps = true;
  const int others = members.size() - 1, place = members.wrapped(members.self() - root);
  std::vector<Span> parts;  // of the members at places 1, 2, ... after the root
  std::uint32_t pieces = 0;
  for (int i = 0; i < others; ++i) {
    auto [first, last] = share(data.bytes, 1, others, i);
    parts.push_back(slice(data, first, last - first));
    pieces = std::max(pieces, pieces_of(last - first));
  }
  auto piece = [&](int of_place, std::uint32_t index) {  // as many for each, of almost equal size
    const Span& part = parts[of_place - 1];
    auto [first, last] = share(part.bytes, 1, static_cast<int>(pieces), static_cast<int>(index));
    return slice(part, first, last - first);
  };
  Messages messages(op);
  if (place == 0) {
    for (std::uint32_t index = 0; index < pieces; ++index)
      for (int i = 1; i <= others; ++i)
        messages.send(members.rank(root + i), index, piece(i, index).data, piece(i, index).bytes);
  } else {
    for (int i = 1; i <= others; ++i)
      for (std::uint32_t index = 0; i != place && index < pieces; ++index)
        messages.receive(members.rank(root + i), index, piece(i, index).data, piece(i, index).bytes);
    std::deque<Messages> from_root;
    for (std::uint32_t index = 0; index < pieces; ++index)
      from_root.emplace_back(op).receive(members.rank(root), index, piece(place, index).data,
                                         piece(place, index).bytes);
    for (std::uint32_t index = 0; index < pieces; ++index) {
      const Span own = piece(place, index);
      Task arrived = from_root[index].finish_receives();
      co_await arrived;
      for (int i = 1; i < others; ++i)
        messages.send(members.rank(root + 1 + (place - 1 + i) % others), index, own.data, own.bytes);
    }
  }
  Task done = messages.finish();
  co_await done;
}

// Whether that is faster than a tree, by the same model as in algorithm_for().
bool worth_parts(int members, std::uint64_t bytes) {
  if (members < 3 || bytes == 0) return false;
  const auto receivers = static_cast<std::uint64_t>(members) - 1;
  const double pieces = pieces_of((bytes + receivers - 1) / receivers);
  const double others = members - 1, whole = static_cast<double>(bytes);
  const double parts = 2 * kLatency + (pieces + 1) * others * kOverhead + whole * (1 + 1 / (others * pieces));
  return parts < rounds_of(members) * (kLatency + kOverhead + whole) * (1 - kMargin);
}

}  // namespace

Task broadcast(Operation& op, Members members, Span data, int root) {
  if (worth_parts(members.size(), data.bytes)) {
    Task work = broadcast_in_parts(op, members, data, root);
    co_await work;
    co_return;
  }
  // Binomial tree.
  const int size = members.size(), place = members.wrapped(members.self() - root);
  Messages messages(op);
  int reach = 1;
  while (reach <= place) reach *= 2;
  if (place != 0) {
    messages.receive(members.rank(root + place - reach / 2), 0, data.data, data.bytes);
    Task arrived = messages.finish_receives();
    co_await arrived;
  }
  int top = 1;
  while (top < size) top *= 2;
  for (int distance = top / 2; distance >= reach; distance /= 2)
    if (place + distance < size)
      messages.send(members.rank(root + place + distance), 0, data.data, data.bytes);
  Task done = messages.finish();
  co_await done;
}

}  // namespace shoal::collectives
