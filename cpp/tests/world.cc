#include "tests/world.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

namespace shoal::stress {
namespace {

constexpr std::size_t kCapacity = 256 << 20;  // memory of aborted groups is never reused

std::vector<int> random_hosts(Random& random) {
  std::vector<int> hosts(pick(random, 2, chance(random, 3) ? 8 : 4));
  const int topology = pick(random, 0, 3);
  for (std::size_t r = 0; r < hosts.size(); ++r)
    hosts[r] = topology == 0   ? static_cast<int>(r)                         // a network
               : topology == 1 ? pick(random, 0, chance(random, 2) ? 1 : 2)  // several hosts
                               : 0;                                          // one host
  return hosts;
}

}  // namespace

World::World(Random& random) : World(random_hosts(random)) {}

World::World(std::vector<int> hosts, const World* whole)
    : hosts_(std::move(hosts)), mpi_(std::make_shared<FakeMpi>()) {
  for (int rank = 0; rank < size(); ++rank) {
    int local = static_cast<int>(std::count(hosts_.begin(), hosts_.end(), host(rank)));
    Context::Options options{rank, size(), local, kCapacity, kCapacity, 60 * kSecond};
    options.progress_threads = 1 + rank % 3;
    if (whole != nullptr) {
      for (int other = 0; other < size(); ++other) options.world_ranks.push_back(size() - 1 - other);
      options.world = whole->contexts_[size() - 1 - rank];
    }
    contexts_.push_back(std::make_shared<Context>(std::move(options)));
  }
  for (int a = 0; a < size(); ++a)
    for (int b = a + 1; b < size(); ++b) host(a) == host(b) ? share(a, b) : connect(a, b);
  for (auto& context : contexts_) {
    context->use(mpi_);
    context->start();
  }
}

void World::share(int a, int b) {
  const auto ends = connected_sockets();
  std::uint64_t ab = at(a).make_ring(), ba = at(b).make_ring();
  at(a).add_local(b, ends[0], at(b).memory_fd(), at(b).memory_capacity(), ab, ba, getpid());
  at(b).add_local(a, ends[1], at(a).memory_fd(), at(a).memory_capacity(), ba, ab, getpid());
}

void World::connect(int a, int b) {
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0),
      from = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  check(bind(listener, generic, length) == 0 && listen(listener, 1) == 0 &&
            getsockname(listener, generic, &length) == 0 && ::connect(from, generic, length) == 0,
        "cannot connect over loopback");
  int to = accept(listener, nullptr, nullptr);
  check(to >= 0, "cannot accept over loopback");
  ::close(listener);
  at(a).add_remote(b, from);
  at(b).add_remote(a, to);
}

std::shared_ptr<Group> World::make_group(int rank, std::uint64_t ident, const std::vector<int>& members,
                                         int lanes, Scope scope, bool moved, Algorithm algorithm) const {
  Group::Options options{ident, "group " + std::to_string(ident), 0, members, {}, lanes, scope, {}, moved};
  options.algorithm = algorithm;
  options.agreements.vote_timeout = 30 * kSecond;
  options.rank = static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
  for (int member : members) options.hosts.push_back(host(member));
  return at(rank).make_group(std::move(options));
}

}  // namespace shoal::stress
