#include "tests/fake_mpi.h"

#include <cstring>
#include <string>

#include "mpi/mover.h"

namespace shoal::stress {
namespace {

using mpi::Call;
using mpi::Counts;
using mpi::Handle;
using mpi::Parts;
using mpi::Whole;

// Handles of datatypes are the bytes of an element.
std::vector<std::byte> bytes_at(const void* data, std::uint64_t count, Handle type) {
  const auto* from = static_cast<const std::byte*>(data);
  return count == 0 ? std::vector<std::byte>() : std::vector<std::byte>(from, from + count * type);
}

std::byte* part(const Parts& parts, std::size_t index) { return parts.of(index).data; }

}  // namespace

void FakeMpi::connect(Group& group) {
  mpi::MpiMover::Options options;
  options.rank = group.rank();
  options.size = group.size();
  for (std::size_t bytes : {1, 2, 4, 8, 16}) options.types[bytes] = bytes;
  options.exchanges = Random(group.ident())() % 2 == 0;
  {
    std::lock_guard lock(mutex_);
    for (int lane = 0; lane < group.lane_count(); ++lane) {
      auto& comm = comms_[group.ident() << 4 | static_cast<std::uint64_t>(lane)];
      if (!comm) comm = std::make_shared<Comm>(static_cast<std::size_t>(group.size()));
      members_.push_back(std::make_unique<Member>(
          Member{comm, group.rank(), 0, Random(group.ident() + static_cast<std::uint64_t>(lane))}));
      options.comms.push_back(reinterpret_cast<Handle>(members_.back().get()));
    }
  }
  group.set_mover(std::make_shared<mpi::MpiMover>(shared_from_this(), std::move(options)));
}

void FakeMpi::fail_at_start() {
  Failure start = Failure::kAtStart;
  if (failure_.compare_exchange_strong(start, Failure::kNone)) throw MoverFailed("the double fails there");
}

std::uint64_t FakeMpi::add_request(Comm& comm, Call& call) {
  call.requests.push_back(++comm.requests);
  return comm.requests;
}

void FakeMpi::post(const char* name, Member& member, std::vector<Bytes> sent, std::vector<Receive> receives,
                   Call& call) {
  Comm& comm = *member.comm;
  fail_at_start();
  call.arrays.push_back({reinterpret_cast<std::int64_t>(&member)});
  std::lock_guard lock(comm.mutex);
  const std::uint64_t number = member.next++;
  Collective& collective = comm.collectives[number];
  if (collective.name == nullptr) {
    collective.name = name;
    collective.ranks.resize(comm.size);
  }
  check(std::string(collective.name) == name, "ranks call different functions of MPI");
  Posted& mine = collective.ranks[member.rank];
  mine = {add_request(comm, call), std::move(sent), std::move(receives), false};
  deliver(comm, collective);
  if (collective.delivered == comm.size) comm.collectives.erase(number);
}

// Delivers to each rank for which all sources have posted.
void FakeMpi::deliver(Comm& comm, Collective& collective) {
  for (std::size_t rank = 0; rank < collective.ranks.size(); ++rank) {
    Posted& mine = collective.ranks[rank];
    if (mine.request == 0 || mine.delivered) continue;
    bool there = true;
    for (const Receive& receive : mine.receives) there &= collective.ranks[receive.source].request != 0;
    if (!there) continue;
    for (const Receive& receive : mine.receives) {
      const auto& sent = collective.ranks[receive.source].sent;
      const Bytes& bytes = sent.size() == 1 ? sent[0] : sent[rank];
      check(bytes.size() == receive.bytes, std::string(collective.name) + " with different sizes");
      if (!bytes.empty()) std::memcpy(receive.to, bytes.data(), bytes.size());
    }
    mine.delivered = true;
    ++collective.delivered;
    comm.complete.insert(mine.request);
  }
}

void FakeMpi::exchange(const Parts& from, const Parts& to, Handle handle, Call& call) {
  Member& member = member_of(handle);
  Comm& comm = *member.comm;
  check(from.counts[member.rank] == 0 && to.counts[member.rank] == 0, "a message to its sender");
  call.arrays.push_back({reinterpret_cast<std::int64_t>(&member)});
  std::lock_guard lock(comm.mutex);
  for (int rank = 0; rank < static_cast<int>(comm.size); ++rank) {
    if (to.counts[rank] == 0) continue;
    Messages& messages = comm.messages[{rank, member.rank}];
    messages.receives.push_back({add_request(comm, call), to.of(rank)});
    match(comm, messages);
  }
  for (int rank = 0; rank < static_cast<int>(comm.size); ++rank) {
    if (from.counts[rank] == 0) continue;
    fail_at_start();
    Messages& messages = comm.messages[{member.rank, rank}];
    messages.sends.push_back({add_request(comm, call), from.of(rank)});
    match(comm, messages);
  }
}

// Delivers the message that two ranks have posted.
void FakeMpi::match(Comm& comm, Messages& messages) {
  if (messages.sends.empty() || messages.receives.empty()) return;
  const Message sent = messages.sends.front(), received = messages.receives.front();
  check(sent.data.bytes == received.data.bytes, "a message and its receiver have different sizes");
  std::memcpy(received.data.data, sent.data.data, sent.data.bytes);
  comm.complete.insert({sent.request, received.request});
  messages.sends.pop_front();
  messages.receives.pop_front();
}

bool FakeMpi::complete(Call& call) {
  if (call.requests.empty()) return true;
  Failure later = Failure::kLater;
  if (failure_.compare_exchange_strong(later, Failure::kNone)) {
    call.failure = "the double fails there";
    return true;
  }
  Member& member = *reinterpret_cast<Member*>(call.arrays.at(0).at(0));
  Comm& comm = *member.comm;
  std::lock_guard lock(comm.mutex);
  while (!call.requests.empty()) {
    if (chance(member.random, 3) || comm.complete.erase(call.requests.back()) == 0) return false;
    call.requests.pop_back();
  }
  return true;
}

void FakeMpi::all_reduce(const Whole&, Handle, Handle, Call&) { die("MPI reduces"); }
void FakeMpi::reduce(const Whole&, Handle, int, bool, Handle, Call&) { die("MPI reduces"); }
void FakeMpi::reduce_scatter(const void*, const Whole&, const Counts&, Handle, Handle, Call&) {
  die("MPI reduces");
}

void FakeMpi::broadcast(const Whole& x, int root, Handle comm, Call& call) {
  Member& member = member_of(comm);
  const bool at_root = member.rank == root;
  std::vector<Bytes> sent;
  std::vector<Receive> receives;
  if (at_root)
    sent.push_back(bytes_at(x.data, x.count, x.type));
  else
    receives.push_back({root, static_cast<std::byte*>(x.data), x.count * x.type});
  post("broadcast", member, std::move(sent), std::move(receives), call);
}

void FakeMpi::all_gather(const Parts& parts, Handle comm, Call& call) {
  Member& member = member_of(comm);
  std::vector<Bytes> sent;
  std::vector<Receive> receives;
  for (int rank = 0; rank < static_cast<int>(parts.counts.size()); ++rank) {
    if (rank == member.rank)
      sent.push_back(bytes_at(part(parts, rank), parts.counts[rank], parts.type));
    else
      receives.push_back({rank, part(parts, rank), parts.counts[rank] * parts.type});
  }
  post("all_gather", member, std::move(sent), std::move(receives), call);
}

void FakeMpi::gather_parts(const Whole* from, const Parts* to, int root, Handle comm, Call& call) {
  Member& member = member_of(comm);
  check((to != nullptr) == (member.rank == root), "a gather without a root, or with two");
  std::vector<Bytes> sent;
  if (from != nullptr) sent.push_back(bytes_at(from->data, from->count, from->type));
  std::vector<Receive> receives;
  for (std::size_t rank = 0; to != nullptr && rank < to->counts.size(); ++rank)
    if (from != nullptr || static_cast<int>(rank) != root)
      receives.push_back({static_cast<int>(rank), part(*to, rank), to->counts[rank] * to->type});
  post("gather", member, std::move(sent), std::move(receives), call);
}

void FakeMpi::scatter_parts(const Parts* from, const Whole& to, int root, Handle comm, Call& call) {
  std::vector<Bytes> sent;
  for (std::size_t rank = 0; from != nullptr && rank < from->counts.size(); ++rank)
    sent.push_back(bytes_at(part(*from, rank), from->counts[rank], from->type));
  post("scatter", member_of(comm), std::move(sent),
       {{root, static_cast<std::byte*>(to.data), to.count * to.type}}, call);
}

void FakeMpi::all_to_all(const void* from, void* to, Handle type, Handle comm, Call& call) {
  const Counts counts(member_of(comm).comm->size, 1);
  const Counts starts = mpi::starts_of(counts);
  all_to_all_parts({const_cast<void*>(from), counts, starts, type, type}, {to, counts, starts, type, type},
                   comm, call);
}

void FakeMpi::all_to_all_parts(const Parts& from, const Parts& to, Handle comm, Call& call) {
  std::vector<Bytes> sent;
  std::vector<Receive> receives;
  for (std::size_t rank = 0; rank < from.counts.size(); ++rank) {
    sent.push_back(bytes_at(part(from, rank), from.counts[rank], from.type));
    receives.push_back({static_cast<int>(rank), part(to, rank), to.counts[rank] * to.type});
  }
  post("all_to_all", member_of(comm), std::move(sent), std::move(receives), call);
}

}  // namespace shoal::stress
