// A pairwise group: messages that either side cancels at any moment, and ranks that are lost.
//
// In each round every rank sends messages of all sizes to the next rank, and both sides cancel some of their
// operations at random times.  Then they exchange the lists of cancelled operations, and finish: a message
// that neither side cancelled must have arrived completely, a withdrawn message must not, and memory that a
// cancelled receive has returned must not change.  In some worlds a rank loses its connections between two
// rounds: the others continue without it.

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "tests/calls.h"
#include "tests/scenes.h"
#include "tests/world.h"

namespace shoal::stress {
namespace {

constexpr int kMessages = 6;
constexpr std::uint64_t kNews = 1ULL << 40;  // tags of the lists that the ranks exchange
constexpr std::uint64_t kNever = 1ULL << 41;
constexpr std::byte kGivenBack{0xA5};

class PairRank {
 public:
  PairRank(World& world, Watchdog& watchdog, Tally& tally, std::uint64_t seed, int rank, int rounds, int lost,
           int lost_at, std::atomic<int>& noticed)
      : world_(world),
        desk_(watchdog.desk(rank)),
        tally_(tally),
        script_(seed),
        own_(seed * 1009 + static_cast<std::uint64_t>(rank)),
        rank_(rank),
        rounds_(rounds),
        lost_(lost),
        lost_at_(lost_at),
        noticed_(noticed) {
    for (int r = 0; r < world.size(); ++r) ring_.push_back(r);
  }

  void run() {
    desk_.doing("making a pairwise group");
    group_ = world_.make_group(rank_, 7, ring_, 1, Scope::kPair);
    if (rank_ == 0) ++tally_.groups;
    for (int round = 0; round < rounds_; ++round) {
      if (round == lost_at_ && (!lose() || ring_.size() == 1)) return leave();
      exchange(round);
    }
    check(!group_->failure(), "a pairwise group is broken");
    leave();
  }

 private:
  struct Sent {
    std::vector<std::byte> data;
    OperationPtr op;
    bool cancelled = false;
  };
  struct Received {
    std::vector<std::byte> data;
    bool buffer = true;
    OperationPtr op;
    bool cancelled = false;
  };

  Context& context() { return world_.at(rank_); }
  int neighbour(int step) const {
    const auto me = std::find(ring_.begin(), ring_.end(), rank_) - ring_.begin();
    const auto size = static_cast<std::ptrdiff_t>(ring_.size());
    return ring_[(me + step + size) % size];
  }

  OperationPtr message(Kind kind, int peer, std::uint64_t tag, std::vector<std::byte>* data) {
    std::optional<Span> span;
    if (data != nullptr) span = {data->data(), data->size()};
    auto op = group_->submit(message_request(kind, peer, tag, DType::kUInt8, span));
    desk_.begun(op);
    return op;
  }

  // True if it completed.
  bool finish(const OperationPtr& op) {
    check(context().wait(*op, now_ns() + 2 * kPatience), "a message hangs");
    desk_.ended(op);
    return op->error().code == ErrorCode::kNone;
  }

  static std::byte content(int from, int round, int index) {
    return static_cast<std::byte>((from * 31 + round * 7 + index) % 128);
  }

  // Exchanges each rank's list of cancelled operations with both of its neighbours.
  std::pair<std::uint8_t, std::uint8_t> news(int round, std::uint8_t sends, std::uint8_t receives) {
    const std::uint64_t tag = kNews + static_cast<std::uint64_t>(round) * 2;
    std::vector<std::byte> forward{static_cast<std::byte>(sends)}, back{static_cast<std::byte>(receives)};
    std::vector<std::byte> of_last(1), of_next(1);
    const OperationPtr ops[] = {message(Kind::kRecv, neighbour(-1), tag, &of_last),
                                message(Kind::kRecv, neighbour(1), tag + 1, &of_next),
                                message(Kind::kSend, neighbour(1), tag, &forward),
                                message(Kind::kSend, neighbour(-1), tag + 1, &back)};
    for (const auto& op : ops) check(finish(op), "a message of a good pair failed: " + op->error().text);
    return {static_cast<std::uint8_t>(of_last[0]), static_cast<std::uint8_t>(of_next[0])};
  }

  template <class List>
  static std::uint8_t mask(const List& list) {
    std::uint8_t bits = 0;
    for (std::size_t i = 0; i < list.size(); ++i) bits |= static_cast<std::uint8_t>(list[i].cancelled << i);
    return bits;
  }

  void withdraw(Received& receive) {
    if (!receive.op->cancel()) return;
    receive.cancelled = true;
    desk_.ended(receive.op);
    check(receive.op->error().code == ErrorCode::kCancelled, "a cancelled receive ended otherwise");
    std::fill(receive.data.begin(), receive.data.end(), kGivenBack);
  }

  void withdraw(Sent& send) {
    if (!send.op->cancel()) return;
    send.cancelled = true;
    desk_.ended(send.op);
    std::fill(send.data.begin(), send.data.end(), kGivenBack);
  }

  void exchange(int round) {
    desk_.doing("exchanging messages that are taken back", group_.get());
    std::vector<std::size_t> sizes;
    for (int i = 0; i < kMessages; ++i) {
      const int kind = pick(script_, 0, 5);
      sizes.push_back(static_cast<std::size_t>(kind == 0   ? pick(script_, 0, 3)
                                               : kind < 3  ? pick(script_, 1000, 100'000)
                                               : kind == 3 ? pick(script_, 250'000, 270'000)
                                                           : pick(script_, 500'000, 1'500'000)));
    }
    std::vector<Sent> sends(kMessages);
    std::vector<Received> receives(kMessages);
    const int next = neighbour(1), last = neighbour(-1);
    auto tag = [&](int i) {
      return static_cast<std::uint64_t>(round) * kMessages + static_cast<unsigned>(i);
    };
    // Receives and sends in any order, and cancels between them.
    std::vector<int> order;
    for (int i = 0; i < 2 * kMessages; ++i) order.push_back(i);
    std::shuffle(order.begin(), order.end(), own_);
    for (int step : order) {
      const int i = step % kMessages;
      dawdle(own_);
      if (step < kMessages) {
        sends[i].data.assign(sizes[i], content(rank_, round, i));
        sends[i].op = message(Kind::kSend, next, tag(i), &sends[i].data);
      } else {
        receives[i].buffer = pick(own_, 0, 1);
        if (receives[i].buffer) receives[i].data.resize(sizes[i]);
        receives[i].op = message(Kind::kRecv, chance(own_, 3) ? -1 : last, tag(i),
                                 receives[i].buffer ? &receives[i].data : nullptr);
      }
      if (chance(own_, 4)) {
        auto& send = sends[pick(own_, 0, kMessages - 1)];
        if (send.op && !send.cancelled) withdraw(send);
      }
      if (chance(own_, 4)) {
        auto& receive = receives[pick(own_, 0, kMessages - 1)];
        if (receive.op && !receive.cancelled) withdraw(receive);
      }
    }
    const std::uint8_t mine = mask(sends), refused = mask(receives);
    auto [withdrawn, unwanted] = news(2 * round, mine, refused);
    for (int i = 0; i < kMessages; ++i) {
      auto& send = sends[i];
      auto& receive = receives[i];
      if (!receive.cancelled && (withdrawn >> i & 1)) {
        withdraw(receive);
        check(receive.cancelled, "a message that was taken back has arrived");
      }
      if (!send.cancelled && (unwanted >> i & 1)) withdraw(send);
    }
    for (int i = 0; i < kMessages; ++i) {
      auto& send = sends[i];
      auto& receive = receives[i];
      if (!send.cancelled) check(finish(send.op), "a message failed: " + send.op->error().text);
      if (receive.cancelled) continue;
      check(finish(receive.op), "a receive failed: " + receive.op->error().text);
      const auto& arrived = *receive.op->received;
      check(arrived.header.total == sizes[i], "a message has another length");
      const std::byte* data = receive.buffer ? receive.data.data() : arrived.owned.get();
      check(std::all_of(data, data + arrived.header.total,
                        [&](std::byte b) { return b == content(last, round, i); }),
            "a message is wrong");
    }
    // All messages in flight have arrived now.
    news(2 * round + 1, 0, 0);
    for (auto& receive : receives)
      if (receive.cancelled)
        check(std::all_of(receive.data.begin(), receive.data.end(),
                          [](std::byte b) { return b == kGivenBack; }),
              "memory of a cancelled receive was written to");
    ++tally_.collectives;
  }

  // One rank loses all connections; returns false on that rank.
  bool lose() {
    desk_.doing("losing a rank", group_.get());
    std::vector<std::byte> room(100), large(2 << 20);
    if (rank_ == lost_) {
      std::vector<std::byte> half(300'000);
      auto unread = message(Kind::kSend, neighbour(1), kNever, &half);
      for (int r = 0; r < world_.size(); ++r)
        if (r != rank_) context().peers().disconnect(r);
      auto receive = message(Kind::kRecv, -1, kNever, nullptr);
      check(!finish(receive) && receive->error().code == ErrorCode::kPeerLost,
            "a rank without peers receives");
      finish(unread);
      ++noticed_;
      return false;
    }
    const OperationPtr ops[] = {message(Kind::kRecv, lost_, kNever + 1, &room),
                                message(Kind::kSend, lost_, kNever + 1, &large)};
    auto any = message(Kind::kRecv, -1, kNever, nullptr);
    for (const auto& op : ops) {
      check(!finish(op) && op->error().code == ErrorCode::kPeerLost, "a message to a lost rank did not fail");
      check(op->error().ranks == std::vector<int>{lost_}, "another rank is lost");
    }
    ++noticed_;
    std::vector<std::byte> little(1);
    auto later = message(Kind::kSend, lost_, 1, &little);
    check(later->done() && !finish(later), "a message to a lost rank is not refused at once");
    std::erase(ring_, lost_);
    if (ring_.size() == 1) {
      // The last message of the lost rank may have arrived completely.
      check(finish(any) || any->error().code == ErrorCode::kPeerLost, "a receive from nobody goes on");
      return true;
    }
    auto cheer = message(Kind::kSend, neighbour(1), kNever, &room);
    check(finish(cheer) && finish(any), "a receive from anybody ended with one of them");
    return true;
  }

  void leave() {
    desk_.doing("waiting until all know of the lost rank", group_.get());
    // Either side may receive a goodbye before it detects the loss; then the peer has left and is not lost.
    while (lost_at_ >= 0 && noticed_ < world_.size()) std::this_thread::yield();
    desk_.doing("closing");
    group_->close(now_ns() + 20 * kSecond);
    context().close(now_ns() + 2 * kSecond);
    group_.reset();
    desk_.doing("having finished");
  }

  World& world_;
  Desk& desk_;
  Tally& tally_;
  Random script_, own_;
  const int rank_;
  const int rounds_;
  const int lost_, lost_at_;
  std::atomic<int>& noticed_;  // number of ranks that know of the loss, including the lost one
  std::vector<int> ring_;      // participating ranks
  std::shared_ptr<Group> group_;
};

}  // namespace

void pairs(std::uint64_t seed, Watchdog& watchdog, Tally& tally) {
  Random random(seed);
  World world(random);
  const int rounds = pick(random, 2, 12);
  const int lost = pick(random, 0, world.size() - 1);
  const int lost_at = chance(random, 2) ? pick(random, 0, rounds - 1) : -1;
  std::atomic<int> noticed{0};
  run_ranks(world.size(), [&](int rank) {
    PairRank(world, watchdog, tally, seed + 5, rank, rounds, lost, lost_at, noticed).run();
  });
}

}  // namespace shoal::stress
