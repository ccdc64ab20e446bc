// Posts that call each other at random.
//
// In a round of calls, connections are cut and made again, calls are cancelled and time out, handlers answer
// late or never, and endpoints are closed, all at random times.  Every call must end, every reply must belong
// to its call, and the packets of an ordered mailbox must arrive in order.

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "rpc/endpoint.h"
#include "tests/scenes.h"
#include "tests/support.h"

namespace shoal::stress {
namespace {

constexpr std::uint64_t kBudget = 1 << 20;
constexpr std::uint32_t kOrdered = 7;

using Bytes = std::vector<std::byte>;

std::span<const std::byte> view(const Bytes& bytes) { return bytes; }

// Bytes that identify their sender, of all sizes that take different paths.
Bytes random_bytes(Random& random) {
  constexpr std::size_t kSizes[] = {0, 1, 100, kInsideLimit, kInsideLimit + 1, kEager, kEager + 1, 700'000};
  Bytes bytes(kSizes[pick(random, 0, chance(random, 4) ? 7 : 4)]);
  const auto fill = static_cast<std::byte>(random());
  std::fill(bytes.begin(), bytes.end(), fill);
  return bytes;
}

// One endpoint with the threads that use it.
class Station {
 public:
  explicit Station(std::uint64_t seed)
      : endpoint(std::make_shared<RpcEndpoint>(RpcEndpoint::Options{kBudget, 600 * kSecond})), seed_(seed) {
    endpoint->inbox().open(kOrdered);
  }

  void start(std::vector<std::atomic<int>>& names) {
    for (int i = 0; i < 3; ++i) threads_.emplace_back([this, i] { handle(Random(seed_ * 16 + 1 + i)); });
    threads_.emplace_back([this] { read_in_order(); });
    threads_.emplace_back([this] { count_tickets(); });
    for (int i = 0; i < 2; ++i)
      callers_.emplace_back([this, i, &names] { call(Random(seed_ * 16 + 8 + i), names); });
  }
  void join_callers() {
    for (auto& caller : callers_) caller.join();
  }
  void end(std::int64_t patience) {
    endpoint->close(now_ns() + patience);
    for (auto& thread : threads_) thread.join();
    const auto stats = endpoint->stats();
    check(stats.peers == 0 && stats.calls == 0 && stats.handled == 0 && stats.kept == 0,
          "a closed endpoint holds something");
  }

  std::shared_ptr<RpcEndpoint> endpoint;
  std::atomic<std::uint64_t> answered{0}, failed{0};

 private:
  void handle(Random random) {
    while (true) {
      std::vector<PacketPtr> packets;
      if (!endpoint->inbox().take(0, now_ns() + kSecond, static_cast<std::size_t>(pick(random, 1, 3)),
                                  packets))
        return;
      for (auto& packet : packets) {
        packet->taken();
        dawdle(random);
        if (chance(random, 60)) {
          endpoint->abandon(*packet);
          continue;
        }
        if (chance(random, 10)) packet->handling->describe("a handler");
        PacketFields fields;
        fields.verb = chance(random, 10) ? Verb::kFailure : Verb::kReply;
        std::vector<PartToSend> parts;
        const auto copies = std::make_shared<std::vector<std::shared_ptr<std::byte>>>();
        for (const Part& part : packet->parts) {
          const std::byte* data = part.data.get();
          if (auto copy = chance(random, 2) ? endpoint->part_to_send(part.bytes) : nullptr) {
            std::copy_n(data, part.bytes, copy.get());
            data = copies->emplace_back(std::move(copy)).get();
          }
          parts.push_back({data, part.bytes});
        }
        auto keep = std::make_shared<std::pair<PacketPtr, std::shared_ptr<void>>>(packet, copies);
        endpoint->reply(*packet, {fields, packet->head(), parts, std::move(keep)});
      }
    }
  }

  // The packets contain the caller and a counter; only a cut leaves gaps.
  void read_in_order() {
    std::map<std::pair<int, std::uint64_t>, std::uint64_t> last;
    while (true) {
      std::vector<PacketPtr> packets;
      if (!endpoint->inbox().take(kOrdered, now_ns() + kSecond, 4, packets)) return;
      for (auto& packet : packets) {
        packet->taken();
        std::uint64_t says[2];
        check(packet->head().size() == sizeof says, "the head of a packet was lost");
        std::memcpy(says, packet->head().data(), sizeof says);
        auto& before = last[{packet->peer, says[0]}];
        check(says[1] > before, "packets of one mailbox out of order");
        before = says[1];
      }
    }
  }

  void count_tickets() {
    std::vector<std::int64_t> due;
    while (endpoint->tickets().wait(now_ns() + kSecond, due)) {
    }
  }

  void finish(const CallPtr& call, const Bytes& head, const std::vector<std::shared_ptr<Bytes>>& parts) {
    while (!call->wait(now_ns() + kSecond)) {  // forever: the watchdog detects hangs
    }
    if (call->error().first != CallEnd::kNone) {
      ++failed;
      return;
    }
    const PacketPtr reply = call->take_reply();
    check(reply != nullptr, "a call without error or reply");
    check(std::ranges::equal(reply->head(), head), "the reply to another call");
    check(reply->parts.size() == parts.size(), "a reply with other parts");
    for (std::size_t i = 0; i < parts.size(); ++i)
      check(reply->parts[i].bytes == parts[i]->size() &&
                std::equal(parts[i]->begin(), parts[i]->end(), reply->parts[i].data.get()),
            "a part of other bytes");
    ++answered;
  }

  void call(Random random, std::vector<std::atomic<int>>& names) {
    const std::uint64_t self = random();
    std::uint64_t count = 0;
    std::vector<std::function<void()>> held;
    auto fill = [&](std::size_t left) {
      while (held.size() > left) {
        const auto next = held.begin() + pick(random, 0, static_cast<int>(held.size()) - 1);
        (*next)();
        held.erase(next);
      }
    };
    for (int round = 0; round < 60; ++round) {
      if (chance(random, 3)) fill(static_cast<std::size_t>(pick(random, 0, 4)));
      const int peer = names[pick(random, 0, static_cast<int>(names.size()) - 1)];
      if (chance(random, 4)) {
        const std::uint64_t says[2] = {self, ++count};
        const auto bytes = std::make_shared<Bytes>(random_bytes(random));
        const PartToSend part{bytes->data(), bytes->size()};
        PacketFields fields;
        fields.verb = Verb::kPost;
        fields.mailbox = kOrdered;
        if (!endpoint->await_room(peer, bytes->size(), now_ns() + kSecond)) continue;
        if (!chance(random, 3)) {
          endpoint->send(peer, {fields, std::as_bytes(std::span(says)), {&part, 1}, bytes});
          continue;
        }
        const auto place = endpoint->hold(peer, kOrdered, 0, false, true, {});
        held.push_back([=, this, says = std::array{says[0], says[1]}] {
          if (says[1] % 9 == 0)
            endpoint->abandon_held(place, "its contents never came");
          else
            endpoint->fill(*place, {fields, std::as_bytes(std::span(says)), {&part, 1}, bytes});
        });
        continue;
      }
      PacketFields fields;
      fields.verb = Verb::kCall;
      Bytes head = random_bytes(random);
      std::vector<std::shared_ptr<Bytes>> buffers;
      std::vector<PartToSend> parts;
      for (int i = pick(random, 0, 3); i > 0; --i) {
        buffers.push_back(std::make_shared<Bytes>(random_bytes(random)));
        parts.push_back({buffers.back()->data(), buffers.back()->size()});
      }
      auto keep = std::make_shared<std::vector<std::shared_ptr<Bytes>>>(buffers);
      const std::int64_t patience = chance(random, 5) ? pick(random, 0, 3) * kMillisecond : kSecond;
      const bool room = endpoint->await_room(peer, head.size(), now_ns() + patience);
      CallPtr call;
      if (chance(random, 4)) {
        const std::uint64_t staged = head.size();
        const bool counted = endpoint->await_room(peer, staged, now_ns() + patience, true);
        call = endpoint->hold(peer, fields.mailbox, now_ns() + patience, !counted, false, {});
        held.push_back([=, this, at = pick(random, 0, 9)] {
          if (at == 0)
            endpoint->abandon_held(call, "its contents never came");
          else
            endpoint->fill(*call, {fields, view(head), parts, keep});
          if (counted) endpoint->unstage(peer, staged);
        });
      } else {
        call = endpoint->request(peer, {fields, view(head), parts, keep}, now_ns() + patience, !room, {});
      }
      keep.reset();
      if (chance(random, 5)) call->announce(5);
      if (chance(random, 6)) {
        dawdle(random);
        endpoint->cancel(call);
      }
      if (chance(random, 8)) continue;  // no thread waits for it
      fill(0);
      finish(call, head, buffers);
    }
    fill(0);
  }

  const std::uint64_t seed_;
  std::vector<std::thread> threads_, callers_;
};

}  // namespace

void endpoints(std::uint64_t seed, Tally& tally) {
  Random random(seed);
  constexpr std::size_t kStations = 3;
  std::vector<std::unique_ptr<Station>> stations;
  std::vector<std::vector<std::atomic<int>>> names(kStations);
  for (std::size_t i = 0; i < kStations; ++i) {
    stations.push_back(std::make_unique<Station>(seed * kStations + i));
    names[i] = std::vector<std::atomic<int>>(kStations);
  }
  auto connect = [&](std::size_t from, std::size_t to) {
    const auto ends = connected_sockets();
    RpcEndpoint &caller = *stations[from]->endpoint, &callee = *stations[to]->endpoint;
    const bool share = !chance(random, 4);
    try {
      callee.attach(ends[1], getpid(), 2, share ? caller.memory() : -1);
    } catch (const std::system_error&) {
      ::close(ends[0]);
      return;
    }
    names[from][to] = caller.attach(ends[0], getpid(), 1, share ? callee.memory() : -1);
  };
  for (std::size_t from = 0; from < kStations; ++from)
    for (std::size_t to = 0; to < kStations; ++to) connect(from, to);
  for (std::size_t i = 0; i < kStations; ++i) stations[i]->start(names[i]);
  for (int cut = pick(random, 0, 6); cut > 0; --cut) {
    nap(random, 0, 20'000);
    const auto from = static_cast<std::size_t>(pick(random, 0, kStations - 1));
    const auto to = static_cast<std::size_t>(pick(random, 0, kStations - 1));
    if (chance(random, 2))
      stations[from]->endpoint->disconnect(names[from][to]);
    else
      stations[from]->endpoint->drop(names[from][to], "the test drops it");
    connect(from, to);
  }
  const bool violent = chance(random, 3);  // some endpoints close while others call them
  if (violent) stations[0]->endpoint->close(now_ns() + kSecond / 100);
  for (auto& station : stations) station->join_callers();
  if (!violent)  // lent memory is returned; if not, the watchdog detects it
    for (auto& station : stations)
      while (station->endpoint->stats().lent > 0) nap(random, 0, 1000);
  for (auto& station : stations) {
    station->end(violent ? 0 : kSecond);
    tally.collectives += station->answered;
    tally.failures += station->failed;
  }
}

}  // namespace shoal::stress
