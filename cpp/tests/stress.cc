// Races of the core, for the sanitizers: ranks as threads of one process, everything at random times.
//
//   stress [seconds] [seed]
//
// Each round makes 2 to 8 contexts, connects them through shared memory, TCP over loopback or both, and lets
// every rank run the same random list of operations: collectives of random kinds and sizes in ordinary and in
// shared memory, waited for out of order or not at all, messages, operations matched by key from a second
// thread, in several groups at once.  All results are checked.  Some rounds end with an abort or a cut
// connection in the middle instead of a close.
//
// What a thread sanitizer cannot see: ranks reach one another's memory through mappings of their own, so the
// same byte has a different address on each rank.  Races between the threads of a rank are found, races
// between ranks are not; for those there are the checks of the results.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/clock.h"
#include "engine/context.h"
#include "tests/known.h"

using namespace shoal;
using namespace shoal::stress;

// As in cpp/transport/ring_link.h, for TCP: what is read for sending is not looked at.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "intercept_send=0";
}

namespace {

// -- one round's ranks ---------------------------------------------------------------------------

struct World {
  int size;
  std::vector<int> hosts;
  std::vector<std::shared_ptr<Context>> contexts;

  World(int size, std::vector<int> hosts) : size(size), hosts(std::move(hosts)) {
    for (int rank = 0; rank < size; ++rank) {
      int local = static_cast<int>(std::count(this->hosts.begin(), this->hosts.end(), host(rank)));
      contexts.push_back(
          std::make_shared<Context>(Context::Options{rank, size, local, kCapacity, kCapacity, 60 * kSecond}));
    }
    for (int a = 0; a < size; ++a)
      for (int b = a + 1; b < size; ++b) host(a) == host(b) ? share(a, b) : connect(a, b);
    for (auto& context : contexts) context->start();
  }
  int host(int rank) const { return hosts[static_cast<std::size_t>(rank)]; }
  Context& at(int rank) const { return *contexts[static_cast<std::size_t>(rank)]; }

 private:
  void share(int a, int b) {
    int ends[2];
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "socketpair failed");
    std::uint64_t ab = at(a).make_ring(), ba = at(b).make_ring();
    at(a).add_local(b, ends[0], at(b).memory_fd(), at(b).memory_capacity(), ab, ba, getpid());
    at(b).add_local(a, ends[1], at(a).memory_fd(), at(a).memory_capacity(), ba, ab, getpid());
  }
  void connect(int a, int b) {
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
};

OperationPtr message(Group& group, Kind kind, int peer, std::uint64_t tag, std::vector<std::int32_t>* data) {
  Request request;
  request.kind = kind;
  request.peer = peer;
  request.tag = tag;
  request.timeout = kPatience;
  request.shape.dtype = static_cast<std::uint8_t>(DType::kInt32);
  if (data != nullptr) {
    Span span{reinterpret_cast<std::byte*>(data->data()), data->size() * 4};
    (kind == Kind::kSend ? request.in : request.out).push_back(span);
  }
  return group.submit(std::move(request));
}

// -- what a rank does -----------------------------------------------------------------------------

enum class End { kClose, kAbort, kCut };

struct Round {
  World& world;
  std::uint64_t seed;
  int lanes;
  int steps;
  End end;
  int culprit;  // who aborts or loses its connections
};

class Rank {
 public:
  Rank(Round& round, int rank)
      : round_(round),
        rank_(rank),
        script_(round.seed),
        own_(round.seed * 1009 + static_cast<std::uint64_t>(rank)) {}

  void run() {
    make_groups();
    std::thread side([this, seed = own_()] { keyed(Random(seed)); });
    const int stop =
        round_.end == End::kClose || rank_ != round_.culprit ? -1 : pick(own_, 0, round_.steps - 1);
    bool good = true;
    for (int step = 0; good && step < round_.steps; ++step) {
      if (step == stop) disturb();
      good = pick(script_, 0, 4) == 0 ? messages() : burst();
    }
    side.join();
    check(round_.end != End::kClose || (good && !side_failed_), "an operation failed: " + why());
    for (auto& group : groups_) group->close(now_ns() + (good ? 20 : 2) * kSecond);
    context().close(now_ns() + 2 * kSecond);
    groups_.clear();
  }

 private:
  Context& context() { return round_.world.at(rank_); }

  void make_groups() {
    // All ranks, the even ones with the odd ones apart, and the pairs of neighbours.
    auto add = [&](std::uint64_t ident, auto&& member) {
      Group::Options options{ident, "group " + std::to_string(ident), 0, {}, {}, round_.lanes};
      for (int r = 0; r < round_.world.size; ++r) {
        if (!member(r)) continue;
        if (r == rank_) options.rank = static_cast<int>(options.ranks.size());
        options.ranks.push_back(r);
        options.hosts.push_back(round_.world.host(r));
      }
      dawdle(own_);
      groups_.push_back(context().make_group(std::move(options)));
      numbers_.push_back(0);
    };
    add(round_.seed | 1, [](int) { return true; });
    add((round_.seed | 1) + 2 + static_cast<std::uint64_t>(rank_ % 2) * 2,
        [&](int r) { return r % 2 == rank_ % 2; });
    add((round_.seed | 1) + 100 + static_cast<std::uint64_t>(rank_ / 2) * 2,
        [&](int r) { return r / 2 == rank_ / 2; });
  }

  // Several collectives in flight, waited for in any order, some only by the progress thread.
  bool burst() {
    std::vector<std::unique_ptr<Call>> calls;
    const int count = pick(script_, 1, 6);
    for (int i = 0; i < count; ++i) {
      std::size_t which = static_cast<std::size_t>(pick(script_, 0, 2));
      Random script(script_());  // groups differ in size, so their plans draw differently
      Group& group = *groups_[which];
      dawdle(own_);
      calls.push_back(std::make_unique<Call>(group, plan(script, group.size()), pick(own_, 0, 1) == 1,
                                             numbers_[which]++, false));
    }
    if (pick(own_, 0, 3) == 0)
      for (int i = 0; i < 200 && !calls.back()->operation().done(); ++i)
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    std::shuffle(calls.begin(), calls.end(), own_);
    bool good = true;
    for (auto& call : calls) {
      dawdle(own_);
      good &= call->finish();
    }
    return good;
  }

  // Everybody sends to the next rank, with and without a buffer on the other side, from somebody or from
  // anybody.
  bool messages() {
    Group& group = *groups_[0];
    const std::uint64_t tag = script_() % 1000;
    const std::size_t count =
        static_cast<std::size_t>(pick(script_, 0, 3) == 0 ? 100'000 : pick(script_, 0, 5000));
    const int from = (rank_ + group.size() - 1) % group.size();
    std::vector<std::int32_t> out(count, rank_), in(count, -1);
    const bool first = pick(own_, 0, 1), buffer = pick(own_, 0, 1), anybody = pick(own_, 0, 1);
    OperationPtr receive, send;
    auto take = [&] {
      receive = message(group, Kind::kRecv, anybody ? -1 : from, tag, buffer ? &in : nullptr);
    };
    if (first) take();
    dawdle(own_);
    send = message(group, Kind::kSend, (rank_ + 1) % group.size(), tag, &out);
    dawdle(own_);
    if (!first) take();
    bool good = true;
    for (const auto& op : {receive, send}) {
      check(context().wait(*op, now_ns() + 2 * kPatience), "a message hangs");
      good &= op->error().code == ErrorCode::kNone;
    }
    if (!good) return false;
    const auto& arrived = *receive->received;
    check(arrived.header.source == static_cast<std::uint32_t>(from), "a message came from another rank");
    check(arrived.header.total == count * 4, "a message has another length");
    if (!buffer) std::memcpy(in.data(), arrived.owned.get(), count * 4);
    check(std::all_of(in.begin(), in.end(), [&](std::int32_t v) { return v == from; }), "a message is wrong");
    Call met(group, {Kind::kBarrier, DType::kInt32, 0, -1, 0}, false, numbers_[0]++,
             false);  // the tag is free again
    return met.finish();
  }

  // A second thread of the rank: operations matched by key, in an order of its own.
  void keyed(Random own) {
    Random random(round_.seed + 77);
    std::vector<std::pair<std::uint64_t, Call::Plan>> plans;
    for (int i = 0; i < round_.steps; ++i) {
      Random script(random());
      plans.emplace_back(kKeyed | (random() >> 4), plan(script, groups_[0]->size()));
    }
    for (std::size_t begin = 0; begin < plans.size(); begin += 4) {
      std::size_t end = std::min(begin + 4, plans.size());
      std::shuffle(plans.begin() + static_cast<std::ptrdiff_t>(begin),
                   plans.begin() + static_cast<std::ptrdiff_t>(end), own);
      std::vector<std::unique_ptr<Call>> calls;
      for (std::size_t i = begin; i < end; ++i) {
        dawdle(own);
        calls.push_back(
            std::make_unique<Call>(*groups_[0], plans[i].second, pick(own, 0, 1) == 1, plans[i].first, true));
      }
      for (auto& call : calls)
        if (!call->finish()) side_failed_ = true;
      if (side_failed_) return;
    }
  }

  void disturb() {
    if (round_.end == End::kAbort) {
      for (auto& group : groups_) group->fail({ErrorCode::kAborted, "the stress test aborts", {rank_}}, true);
    } else {
      for (int r = 0; r < round_.world.size; ++r)
        if (r != rank_) context().sever(r);
    }
  }

  std::string why() {
    for (auto& group : groups_)
      if (auto error = group->failure())
        return group->name() + " on rank " + std::to_string(rank_) + ": " + error->text;
    return "no group is broken";
  }

  Round& round_;
  int rank_;
  Random script_, own_;
  std::vector<std::shared_ptr<Group>> groups_;
  std::vector<std::uint64_t> numbers_;
  std::atomic<bool> side_failed_{false};
};

void play(std::uint64_t seed) {
  Random random(seed);
  const int size = pick(random, 2, pick(random, 0, 3) == 0 ? 8 : 4);
  std::vector<int> hosts(static_cast<std::size_t>(size));
  const int topology = pick(random, 0, 2);
  for (int r = 0; r < size; ++r)
    hosts[static_cast<std::size_t>(r)] = topology == 0 ? 0 : topology == 1 ? r : pick(random, 0, 1);
  World world(size, hosts);
  const int ending = pick(random, 0, 5);
  Round round{world,
              seed * 1000 + 1,
              pick(random, 1, 3),
              pick(random, 3, 12),
              ending == 0   ? End::kAbort
              : ending == 1 ? End::kCut
                            : End::kClose,
              pick(random, 0, size - 1)};
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(std::make_unique<Rank>(round, r));
  std::vector<std::thread> threads;
  for (auto& rank : ranks) threads.emplace_back([&rank] { rank->run(); });
  for (auto& thread : threads) thread.join();
}

}  // namespace

int main(int count, char** arguments) {
  const double seconds = count > 1 ? std::atof(arguments[1]) : 10;
  current_seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
  const std::int64_t end = now_ns() + static_cast<std::int64_t>(seconds * 1e9);
  std::uint64_t rounds = 0;
  do {
    play(current_seed);
    ++current_seed, ++rounds;
  } while (now_ns() < end);
  std::printf("%llu rounds, all well\n", static_cast<unsigned long long>(rounds));
  return 0;
}
