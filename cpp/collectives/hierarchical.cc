// Collectives on several hosts, some with several members: shared memory is used first.
//
// m is the size of the smallest host.  Data is split into m slices.  On every host, the member at place j < m
// owns slice j, and only it exchanges this slice with other hosts.  Reductions cross hosts as partial results
// in the accumulator's type and are finished once, by one owner of each element.

#include <algorithm>
#include <memory>

#include "collectives/members.h"
#include "collectives/phase.h"

namespace shoal::collectives {
namespace {

constexpr std::uint64_t kBlock = 16 << 20;      // bytes reduced at a time
constexpr std::uint64_t kOneStream = 64 << 10;  // smaller broadcasts are sent to other hosts in one piece

struct Map {
  const std::vector<std::vector<int>>& hosts;
  int host, place, owners, size;

  explicit Map(const Group& group) : hosts(group.hosts()), host(group.host()), size(group.size()) {
    owners = static_cast<int>(hosts[0].size());
    for (const auto& members : hosts) owners = std::min(owners, static_cast<int>(members.size()));
    const auto& mine = hosts[host];
    place = static_cast<int>(std::find(mine.begin(), mine.end(), group.rank()) - mine.begin());
  }
  int count() const { return static_cast<int>(hosts.size()); }
  int locals() const { return static_cast<int>(hosts[host].size()); }
  int rank_at(int h, int p) const { return hosts[h][p]; }
  // The members of all hosts at a place.
  Members members(int p) const {
    std::vector<int> ranks;
    for (int h = 0; h < count(); ++h) ranks.push_back(rank_at(h, p));
    return {std::move(ranks), host};
  }
  // Whether all hosts have as many members.
  bool uniform() const {
    return std::ranges::all_of(
        hosts, [this](const auto& members) { return members.size() == static_cast<std::size_t>(locals()); });
  }
  // The host and place of a rank.
  std::pair<int, int> find(int rank) const {
    for (int h = 0; h < count(); ++h)
      for (int p = 0; p < static_cast<int>(hosts[h].size()); ++p)
        if (rank_at(h, p) == rank) return {h, p};
    return {-1, -1};
  }
};

// A team of one member has nothing to share.
Task local_exchange(Operation& op, const Map& map, std::vector<Span> parts, std::vector<Pull> pulls) {
  if (map.locals() > 1) {
    Task work = exchange(op, std::move(parts), std::move(pulls));
    co_await work;
    co_return;
  }
  for (const Pull& pull : pulls) copy(pull.to, parts[pull.part]);
}

Task local_partials(Operation& op, const Map& map, std::vector<Span> parts, std::vector<Reduce> jobs) {
  if (map.locals() > 1) {
    Task work = reduce_parts(op, std::move(parts), std::move(jobs), true);
    co_await work;
    co_return;
  }
  const kernels::Reduction& reduction = op.request().reduction;
  for (const Reduce& job : jobs) {
    const void* from = parts[job.part].data;
    kernels::reduce_partial(reduction, job.to, {&from, 1}, parts[job.part].bytes / itemsize(reduction.dtype));
  }
}

// One block of an all-reduce (root < 0) or reduce, which writes only the root's `data`.
Task reduce_block(Operation& op, const Map& map, Span data, int root, std::uint32_t step) {
  const kernels::Reduction& reduction = op.request().reduction;
  const std::size_t item = itemsize(reduction.dtype), wide = kernels::accumulator_size(reduction);
  const std::uint64_t count = data.bytes / item;
  auto [root_host, root_place] = map.find(root);
  std::vector<Span> slices;
  for (int j = 0; j < map.owners; ++j) {
    auto [first, last] = share(count, item, map.owners, j);
    slices.push_back(slice(data, first * item, (last - first) * item));
  }
  const bool owner = map.place < map.owners;
  const Span mine = owner ? slices[map.place] : Span{};
  const std::uint64_t elements = mine.bytes / item;

  const std::uint64_t bytes = elements * wide;
  const auto partial = op.scratch(bytes);
  std::vector<Reduce> jobs;
  if (owner) jobs.push_back({static_cast<std::uint32_t>(map.place), partial.get()});
  Task reduced = local_partials(op, map, slices, std::move(jobs));
  co_await reduced;

  std::shared_ptr<std::byte> result;
  if (root >= 0) result = op.scratch(mine.bytes);
  std::byte* finished = root < 0 ? mine.data : result.get();
  if (owner) {
    const Members members = map.members(map.place);
    const Algorithm algorithm =
        algorithm_for(op.group().algorithm(), op.request().kind, map.count(), mine.bytes, bytes, false);
    Task work = reduce_partials(op, members, algorithm, partial.get(), elements, finished,
                                root < 0 ? -1 : root_host, step);
    co_await work;
  }
  if (root >= 0 && map.host != root_host) co_return;
  std::vector<Span> parts;
  if (owner) parts.push_back({finished, mine.bytes});
  std::vector<Pull> pulls;
  for (int j = 0; j < map.owners; ++j)
    if (root < 0 ? j != map.place : map.place == root_place) pulls.push_back({j, 0, slices[j]});
  Task shared_out = local_exchange(op, map, std::move(parts), std::move(pulls));
  co_await shared_out;
}

Task reduce(Operation& op, Span data, int root) {
  Map map(op.group());
  co_await op.begun();  // clearing the buffers for partial results takes time already
  std::uint32_t step = 0;
  std::uint64_t offset = 0;
  do {
    Span block = slice(data, offset, std::min(kBlock, data.bytes - offset));
    Task work = reduce_block(op, map, block, root, step);
    co_await work;
    offset += block.bytes;
    step += kSteps;
  } while (offset < data.bytes);
}

Task broadcast(Operation& op, Span data, int root) {
  Map map(op.group());
  auto [root_host, root_place] = map.find(root);
  const int streams = data.bytes > kOneStream ? map.owners : 1;
  auto part = [&](int j) {
    auto [first, last] = share(data.bytes, 1, streams, j);
    return slice(data, first, last - first);
  };
  if (map.host == root_host && map.locals() > 1) {
    std::vector<Span> parts;
    std::vector<Pull> pulls;
    if (map.place == root_place)
      parts.push_back(data);
    else
      pulls.push_back({root_place, 0, data});
    Task work = exchange(op, std::move(parts), std::move(pulls));
    co_await work;
  }
  std::vector<Span> parts;
  if (map.place < streams) {
    parts.push_back(part(map.place));
    Task work = broadcast(op, map.members(map.place), parts[0], root_host);
    co_await work;
  }
  if (map.host == root_host) co_return;
  std::vector<Pull> pulls;
  for (int j = 0; j < streams; ++j)
    if (j != map.place) pulls.push_back({j, 0, part(j)});
  Task work = local_exchange(op, map, std::move(parts), std::move(pulls));
  co_await work;
}

Task barrier(Operation& op) {
  Map map(op.group());
  if (map.locals() > 1) {
    Task arrived = meet(op);
    co_await arrived;
  }
  if (map.place == 0) {
    Task met = barrier(op, map.members(0));
    co_await met;
  }
  if (map.locals() > 1) {
    Task released = meet(op);
    co_await released;
  }
}

// The members at a place of all hosts gather their blocks; then the host shares these.
Task all_gather_in_steps(Operation& op, const Map& map, Algorithm algorithm, Span mine,
                         std::vector<Span> out) {
  const Members members = map.members(map.place);
  Edges edges(1, 0);
  for (int h = 0; h < map.count(); ++h) edges.push_back(edges.back() + out[members.rank(h)].bytes);
  co_await op.begun();
  const auto blocks = op.scratch(edges.back());
  std::vector<Span> parts;
  for (int h = 0; h < map.count(); ++h) parts.push_back({blocks.get() + edges[h], edges[h + 1] - edges[h]});
  copy(parts[map.host], mine);
  Task gathered = gather_blocks(op, members, algorithm, blocks.get(), edges, 0);
  co_await gathered;
  std::vector<Pull> pulls;
  for (int place = 0; place < map.locals(); ++place)
    for (int h = 0; h < map.count(); ++h)
      pulls.push_back({place, static_cast<std::uint32_t>(h), out[map.rank_at(h, place)]});
  Task work = local_exchange(op, map, std::move(parts), std::move(pulls));
  co_await work;
}

// Every block is sent to each other host once, to the member at the sender's place (modulo the host's size);
// then the host shares the blocks of its members.
Task all_gather(Operation& op, Span mine, std::vector<Span> out) {
  Map map(op.group());
  const int rank = op.group().rank();
  const std::uint64_t all = total(out);
  const Algorithm algorithm =
      algorithm_for(op.group().algorithm(), Kind::kAllGather, map.count(), all / map.locals(), 0, false);
  if (map.uniform() && algorithm != Algorithm::kDirect) {
    Task work = all_gather_in_steps(op, map, algorithm, mine, std::move(out));
    co_await work;
    co_return;
  }
  auto held_by = [&](int place) {
    std::vector<int> ranks(1, map.rank_at(map.host, place));
    for (int h = 0; h < map.count(); ++h)
      for (int p = 0; h != map.host && p < static_cast<int>(map.hosts[h].size()); ++p)
        if (p % map.locals() == place) ranks.push_back(map.rank_at(h, p));
    return ranks;
  };
  Messages messages(op);
  std::vector<Span> parts;
  for (int source : held_by(map.place)) {
    Span part = source == rank ? mine : out[source];
    if (source != rank) receive_pieces(messages, source, 0, part.data, part.bytes);
    parts.push_back(part);
  }
  for (int h = 0; h < map.count(); ++h) {
    int there = static_cast<int>(map.hosts[h].size());
    if (h != map.host) send_pieces(messages, map.rank_at(h, map.place % there), 0, mine.data, mine.bytes);
  }
  Task arrived = messages.finish();
  co_await arrived;
  std::vector<Pull> pulls;
  for (int place = 0; place < map.locals(); ++place) {
    std::vector<int> held = held_by(place);
    for (std::size_t i = 0; i < held.size(); ++i)
      pulls.push_back({place, static_cast<std::uint32_t>(i), out[held[i]]});
  }
  Task work = local_exchange(op, map, std::move(parts), std::move(pulls));
  co_await work;
}

// On every host, a member reduces the host's inputs for all members at its place; then these reduce them over
// the hosts.
Task reduce_scatter_in_steps(Operation& op, const Map& map, Algorithm algorithm, std::vector<Span> in,
                             Span out) {
  const kernels::Reduction& reduction = op.request().reduction;
  const std::size_t item = itemsize(reduction.dtype), wide = kernels::accumulator_size(reduction);
  const Members members = map.members(map.place);
  Edges edges(1, 0);
  for (int h = 0; h < map.count(); ++h) edges.push_back(edges.back() + in[members.rank(h)].bytes / item);
  const auto partial = op.scratch(edges.back() * wide);
  std::vector<Reduce> jobs;
  for (int h = 0; h < map.count(); ++h)
    jobs.push_back({static_cast<std::uint32_t>(members.rank(h)), partial.get() + edges[h] * wide});
  Task reduced = local_partials(op, map, std::move(in), std::move(jobs));
  co_await reduced;
  Task work = scatter_partials(op, members, algorithm, partial.get(), edges, out.data, 0);
  co_await work;
}

// On every host, the member at place i (modulo the host's size) reduces the host's inputs for rank i and
// sends it the partial result; rank i combines one partial result per host.
Task reduce_scatter(Operation& op, std::vector<Span> in, Span out) {
  Map map(op.group());
  const kernels::Reduction& reduction = op.request().reduction;
  const std::size_t item = itemsize(reduction.dtype), wide = kernels::accumulator_size(reduction);
  const int rank = op.group().rank();
  co_await op.begun();
  const std::uint64_t all = total(in) / map.locals();
  const Algorithm algorithm =
      algorithm_for(op.group().algorithm(), Kind::kReduceScatter, map.count(), all, all / item * wide, false);
  if (map.uniform() && algorithm != Algorithm::kDirect) {
    Task work = reduce_scatter_in_steps(op, map, algorithm, std::move(in), out);
    co_await work;
    co_return;
  }
  std::vector<std::shared_ptr<std::byte>> partials;
  std::vector<Reduce> jobs;
  for (int to = map.place; to < map.size; to += map.locals()) {
    partials.push_back(op.scratch(in[to].bytes / item * wide));
    jobs.push_back({static_cast<std::uint32_t>(to), partials.back().get()});
  }
  std::vector<Reduce> kept = jobs;
  Task reduced = local_partials(op, map, in, std::move(jobs));
  co_await reduced;
  const std::uint64_t length = out.bytes / item * wide;
  Messages messages(op);
  std::byte* const room = messages.scratch(length * map.count());
  std::vector<const void*> sources(map.count());
  for (int h = 0; h < map.count(); ++h) {
    int from = map.rank_at(h, rank % static_cast<int>(map.hosts[h].size()));
    sources[h] = room + h * length;
    if (from != rank) receive_pieces(messages, from, 0, room + h * length, length);
  }
  for (const Reduce& job : kept) {
    int to = static_cast<int>(job.part);
    if (to == rank)
      sources[map.host] = job.to;
    else
      send_pieces(messages, to, 0, job.to, in[job.part].bytes / item * wide);
  }
  Task arrived = messages.finish();
  co_await arrived;
  kernels::finish_partials(reduction, out.data, sources, out.bytes / item);
}

}  // namespace

Task hierarchical(Operation& op) {
  const Request& request = op.request();
  const int size = op.group().size();
  switch (request.pattern()) {
    case Kind::kAllReduce:
      return reduce(op, request.out[0], -1);
    case Kind::kReduce:
      return reduce(op, request.in[0], request.root);
    case Kind::kBroadcast:
      return broadcast(op, request.out[0], request.root);
    case Kind::kBarrier:
      return barrier(op);
    case Kind::kAllGather:
      return all_gather(op, request.in[0], parts_of(request.out, size));
    case Kind::kReduceScatter:
      return reduce_scatter(op, parts_of(request.in, size), request.out[0]);
    default:
      return over_links(op);
  }
}

}  // namespace shoal::collectives
