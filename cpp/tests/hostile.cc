// Peers that pass the handshake and then send invalid data.
//
// The rank under test has two groups with each of them: one with operations in flight, and one that it makes
// only after frames for it have arrived.  A peer follows the protocol for a while, so that errors meet every
// state, and then sends a frame with an error in some field.  The rank must neither crash nor hang: it uses
// or ignores the frame, or ends the connection with an error that names the peer.  Frames without an error
// never end it.

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "collectives/collectives.h"
#include "consensus/message.h"
#include "net/check.h"
#include "net/ring_link.h"
#include "tests/scenes.h"
#include "tests/support.h"
#include "tests/world.h"

namespace shoal::stress {
namespace {

constexpr std::size_t kMemory = 32 << 20;
constexpr std::size_t kRing = 128 * 1024;  // as in engine/peers.cc
constexpr int kPeers = 8;

// -- how a peer's bytes reach the rank under test -------------------------------------------------

class Wire {
 public:
  virtual ~Wire() = default;
  // Number of bytes taken; 0 if there is no room now.
  virtual std::size_t write(const std::byte* data, std::size_t bytes) = 0;
  virtual void drain() = 0;
};

class SocketWire final : public Wire {
 public:
  SocketWire(Context& victim, int peer) {
    const auto ends = connected_sockets(SOCK_NONBLOCK);
    victim.add_remote(peer, ends[0]);
    fd_ = ends[1];
  }
  ~SocketWire() override { ::close(fd_); }
  std::size_t write(const std::byte* data, std::size_t bytes) override {
    ssize_t sent = send(fd_, data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent > 0 ? static_cast<std::size_t>(sent) : 0;
  }
  void drain() override {
    std::byte bytes[65536];
    while (recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT) > 0) {
    }
  }

 private:
  int fd_;
};

class RingWire final : public Wire {
 public:
  RingWire(Context& victim, int peer) : victim_(victim), arena_(kMemory, kMemory) {
    new (arena_.mapping().base() + arena_.allocate(sizeof(ArenaHeader))) ArenaHeader;
    const std::uint64_t mine = arena_.allocate(Ring::footprint(kRing)), theirs = victim.make_ring();
    out_ = new (arena_.mapping().base() + mine) Ring;
    in_ = victim.arena()->mapping().at<Ring>(theirs);
    const auto ends = connected_sockets();
    victim.add_local(peer, ends[0], arena_.fd(), kMemory, theirs, mine, 0);
    socket_ = ends[1];
  }
  ~RingWire() override { ::close(socket_); }
  std::size_t write(const std::byte* data, std::size_t bytes) override {
    const std::uint64_t head = out_->head.load(), used = head - out_->tail.load();
    if (used >= kRing) return 0;
    bytes = std::min<std::size_t>(bytes, kRing - used);
    for (std::size_t i = 0; i < bytes; ++i) out_->data[(head + i) % kRing] = data[i];
    out_->head.store(head + bytes);
    victim_.bell().ring_link();
    return bytes;
  }
  void drain() override { in_->tail.store(in_->head.load()); }
  // The indices can be overwritten like any other words.
  void corrupt(Random& random) {
    (chance(random, 2) ? out_->head : in_->tail).store(random());
    victim_.bell().ring_link();
  }

 private:
  Context& victim_;
  Arena arena_;
  Ring *out_, *in_;
  int socket_;
};

// -- frames of a peer -----------------------------------------------------------------------------

OperationPtr submit(Group& group, Kind kind, std::vector<std::byte>* data, std::uint64_t tag) {
  Request request(kind, collectives::start);
  request.timeout = kPatience;
  request.peer = request.collective() ? -1 : 1;
  request.tag = tag;
  request.reduction.dtype = DType::kFloat32;
  request.reduction.divisor = 2;
  request.shape.dtype = static_cast<std::uint8_t>(DType::kFloat32);
  if (data != nullptr) {
    const Span span{data->data(), data->size()};
    request.shape.dims = 1;
    request.shape.sizes[0] = request.count = data->size() / 4;
    if (kind != Kind::kRecv) request.in.push_back(span);
    if (kind != Kind::kSend) request.out.push_back(span);
  }
  return group.submit(std::move(request));
}

class Peer {
 public:
  Peer(Context& victim, int rank, Random& random, Desk& desk)
      : victim_(victim),
        rank_(rank),
        random_(random()),
        desk_(desk),
        honest_frames_(chance(random_, 2) ? 6 : 60),
        small_(400),
        large_(1 << 20),
        filled_(4000) {
    if (rank % 2)
      wire_ = std::make_unique<SocketWire>(victim, rank);
    else
      wire_ = std::make_unique<RingWire>(victim, rank);
  }

  void begin() {
    group_ = make_group(ident());
    operations_ = {submit(*group_, Kind::kAllReduce, &small_, 0), submit(*group_, Kind::kSend, &large_, 5),
                   submit(*group_, Kind::kRecv, &filled_, 6), submit(*group_, Kind::kRecv, nullptr, 7)};
    for (auto& operation : operations_) desk_.begun(operation);
  }

  // Sends one or more frames; false when the connection has ended.
  bool go_on() {
    if (!late_ && chance(random_, 20)) late_ = make_group(ident() + 1);
    if (broken()) return false;
    desk_.doing(rank_ % 2 ? "a frame over a socket" : "a frame over a ring", group_.get());
    wire_->drain();
    FrameHeader header = honest();
    std::vector<std::byte> payload(header.payload);
    if (header.type == FrameType::kAgree) std::memcpy(payload.data(), vote().data(), payload.size());
    if (auto* ring = dynamic_cast<RingWire*>(wire_.get());
        ring != nullptr && chance(random_, 16 * honest_frames_)) {
      lied_ = true;
      ring->corrupt(random_);
      return true;
    }
    if (chance(random_, honest_frames_)) lie(header, payload);
    if (header.type == FrameType::kMessage) ++messages_;
    left_ |= header.type == FrameType::kBye || header.type == FrameType::kGroupClosed;
    auto bytes = reinterpret_cast<const std::byte*>(&header);
    std::vector<std::byte> frame(bytes, bytes + sizeof header);
    frame.insert(frame.end(), payload.begin(), payload.end());
    const std::int64_t deadline = now_ns() + 30 * kSecond;
    for (std::size_t sent = 0; sent < frame.size() && !broken();) {
      const std::size_t moved = wire_->write(frame.data() + sent, frame.size() - sent);
      sent += moved;
      if (moved > 0) continue;
      wire_->drain();
      check(now_ns() < deadline, "the rank under test does not read");
      std::this_thread::yield();
    }
    ++frames;
    return true;
  }

  // Ends the round; every operation must end.
  void finish(Tally& tally) {
    desk_.doing("the end", group_.get());
    if (broken()) {
      ++tally.failures;
      auto error = group_->failure();
      const std::int64_t deadline = now_ns() + 30 * kSecond;  // another thread may be about to report it
      for (; !error && !left_ && now_ns() < deadline; error = group_->failure()) std::this_thread::yield();
      check(error.has_value() || left_, "a connection broke and its group did not");
      if (error && error->code == ErrorCode::kWire) {
        check(lied_, "an honest frame was refused: " + error->text);
        check(error->ranks == std::vector<int>{1}, "another rank is blamed");
      }
    }
    check(victim_.link(rank_)->unread() <= kUnreadLimit, "the window is overrun");
    group_->abort("the stress test aborts");
    for (auto& operation : operations_) {
      check(victim_.wait(*operation, now_ns() + 60 * kSecond), "an operation hangs");
      desk_.ended(operation);
      if (operation->error().code != ErrorCode::kNone || !operation->received) continue;
      const FrameHeader& header = operation->received->header;
      check(flaw_of_shape(header.shape, header.total) == nullptr, "a message was received that cannot be");
    }
    for (auto& group : {group_, late_})
      if (group) group->close(now_ns());
  }

  std::uint64_t frames = 0;

 private:
  std::uint64_t ident() const { return 1000 + 2 * static_cast<std::uint64_t>(rank_); }
  bool broken() const { return victim_.link(rank_)->broken(); }

  std::shared_ptr<Group> make_group(std::uint64_t ident) {
    return victim_.make_group({ident, "pair", 0, {0, rank_}, {0, 1}, 1, Scope::kAll});
  }

  FrameHeader message(std::uint64_t group) {
    FrameHeader header;
    header.type = FrameType::kMessage;
    header.group = group;
    header.source = 1;
    header.message = messages_ + 1;
    if (chance(random_, 3)) {
      header.call.kind = static_cast<std::uint8_t>(Kind::kAllReduce);
      header.call.dtype = static_cast<std::uint8_t>(DType::kFloat32);
      header.call.lanes = 1;
      header.call.count = 100;
      header.channel = static_cast<std::uint64_t>(pick(random_, 0, 2));
      header.total = 400;
    } else {
      header.channel = kPointToPoint | static_cast<std::uint64_t>(pick(random_, 5, 9));
      header.shape.dtype = static_cast<std::uint8_t>(DType::kFloat32);
      header.shape.dims = 1;
      header.shape.sizes[0] = chance(random_, 10) ? 100'000 : chance(random_, 2) ? 1000 : 0;
      header.total = 4 * header.shape.sizes[0];
    }
    header.payload = static_cast<std::uint32_t>(std::min<std::uint64_t>(header.total, kEager));
    const std::uint64_t charge = header.payload + kHeaderCharge;
    if (victim_.link(rank_)->unread() + charge + unseen_ > kUnreadLimit || chance(random_, 8)) {
      header.code = kDeferred;
      header.payload = 0;
    } else {
      unseen_ += charge;  // the rank under test may not have read it yet
    }
    return header;
  }

  FrameHeader honest() {
    const std::uint64_t group = ident() + (chance(random_, 4) ? 1 : 0);
    FrameHeader header;
    switch (pick(random_, 0, 11)) {
      case 0:
        header.type = FrameType::kHeartbeat;
        return header;
      case 1:
        header.type = FrameType::kGrant;
        header.message = 1;  // the rank has sent at least one message
        return header;
      case 4:
        if (messages_ == 0) return message(group);
        header.type = FrameType::kWithdrawn;
        header.group = group;
        header.source = 1;
        header.channel = kPointToPoint | static_cast<std::uint64_t>(pick(random_, 5, 9));
        header.message = static_cast<std::uint64_t>(pick(random_, 1, static_cast<int>(messages_)));
        return header;
      case 2:
      case 3:
        header.type = chance(random_, 2) ? FrameType::kCallQuery : FrameType::kCallReply;
        header.group = group;
        header.source = 1;
        header.channel = static_cast<std::uint64_t>(pick(random_, 0, 2));
        return header;
      case 5:
        if (!chance(random_, 10)) return message(group);
        header.type = chance(random_, 2) ? FrameType::kBroken : FrameType::kGroupClosed;
        header.group = group;
        header.source = 1;
        if (header.type == FrameType::kBroken) header.code = 4, header.payload = 0, lied_ = true;
        return header;
      case 6:
        header.type = FrameType::kAgree;
        header.group = group;
        header.source = 1;
        header.channel = static_cast<std::uint64_t>(pick(random_, 0, 3));
        header.payload = static_cast<std::uint32_t>(vote().size());
        return header;
      default:
        return message(group);
    }
  }

  static std::string vote() {
    using namespace consensus;
    return encode({MessageType::kVote, 0, RankSet(2), RankSet(2), Vote{Op::kSum, std::string(8, 'v')}, 0, {}},
                  2);
  }

  std::uint64_t number() {
    static constexpr std::uint64_t kEdges[] = {0,
                                               1,
                                               2,
                                               255,
                                               256,
                                               65536,
                                               262144,
                                               262145,
                                               0x7ffffff0,
                                               0xffffffff,
                                               1ULL << 32,
                                               1ULL << 47,
                                               1ULL << 62,
                                               1ULL << 63,
                                               ~0ULL,
                                               ~0ULL >> 1,
                                               1000,
                                               1001,
                                               kPointToPoint | 7};
    return chance(random_, 3) ? random_() : kEdges[pick(random_, 0, static_cast<int>(std::size(kEdges)) - 1)];
  }

  void lie(FrameHeader& header, std::vector<std::byte>& payload) {
    lied_ = true;
    for (int lies = pick(random_, 1, 3); lies > 0; --lies) {
      switch (pick(random_, 0, 13)) {
        case 0:
          header.type = static_cast<FrameType>(pick(random_, 0, 17));
          break;
        case 1:
          header.code = static_cast<std::uint16_t>(number());
          break;
        case 2:
          header.payload = static_cast<std::uint32_t>(number());
          break;
        case 3:
          header.source = static_cast<std::uint32_t>(number());
          break;
        case 4:
          header.group = chance(random_, 2) ? ident() + 1 : number();
          break;
        case 5:
          header.channel = number();
          break;
        case 6:
          header.message = number();
          break;
        case 7:
          header.total = number();
          break;
        case 8:
          header.step = static_cast<std::uint32_t>(number());
          break;
        case 9:
          header.shape.dtype = static_cast<std::uint8_t>(number());
          break;
        case 10:
          header.shape.dims = static_cast<std::uint8_t>(pick(random_, 0, 12));
          break;
        case 11:
          header.shape.sizes[pick(random_, 0, kMaxDims - 1)] = number();
          break;
        case 12: {
          auto bytes = reinterpret_cast<unsigned char*>(&header);
          bytes[pick(random_, 0, sizeof header - 1)] ^= static_cast<unsigned char>(1 << pick(random_, 0, 7));
          break;
        }
        default:
          for (std::byte& byte : payload) byte = static_cast<std::byte>(random_());
      }
    }
    // The claimed number of bytes, or another: then the next header begins somewhere in between.
    if (!chance(random_, 8)) payload.resize(std::min<std::size_t>(header.payload, kMoreLimit));
    for (std::size_t i = 0; i < std::min<std::size_t>(payload.size(), 16); ++i)
      payload[i] = static_cast<std::byte>(random_());
  }

  Context& victim_;
  const int rank_;
  Random random_;
  Desk& desk_;
  const int honest_frames_;  // average number between two errors: late errors meet more states
  std::unique_ptr<Wire> wire_;
  std::vector<std::byte> small_, large_, filled_;
  std::shared_ptr<Group> group_, late_;
  std::vector<OperationPtr> operations_;
  std::uint64_t messages_ = 0;
  std::uint64_t unseen_ = 0;
  bool lied_ = false;
  bool left_ = false;  // it has left the group, and may then do anything to it
};

std::uint64_t frames(Random& random, std::uint64_t count, Watchdog& watchdog, Tally& tally) {
  auto victim =
      std::make_shared<Context>(Context::Options{0, kPeers + 1, kPeers + 1, kMemory, kMemory, 600 * kSecond});
  std::vector<std::unique_ptr<Peer>> peers;
  for (int rank = 1; rank <= kPeers; ++rank)
    peers.push_back(std::make_unique<Peer>(*victim, rank, random, watchdog.desk(0)));
  victim->start();
  for (auto& peer : peers) peer->begin();
  tally.groups += kPeers;
  std::uint64_t sent = 0;
  for (bool any = true; any && sent < count;) {
    any = false;
    sent = 0;
    for (auto& peer : peers) {
      any |= peer->go_on();
      sent += peer->frames;
    }
  }
  for (auto& peer : peers) peer->finish(tally);
  victim->close(now_ns());
  return sent;
}

// Two ranks with shared memory compute, while another thread writes to their published data.
void scribble(Random& random, Watchdog& watchdog, Tally& tally) {
  World world(std::vector<int>{0, 0});
  std::vector<std::shared_ptr<Group>> groups;
  std::vector<std::vector<std::byte>> data;
  for (int rank : {0, 1}) {
    groups.push_back(world.make_group(rank, 1, {0, 1}, 1));
    data.emplace_back(static_cast<std::size_t>(pick(random, 1, 200'000)) * 4);
  }
  data[1].resize(data[0].size());
  ++tally.groups;
  std::atomic<bool> over{false};
  std::thread hand([&, own = Random(random())]() mutable {
    const std::size_t block = sizeof(Counters) + 2 * (sizeof(Slot) + 2 * sizeof(PartEntry) + kInline);
    while (!over) {
      const auto& memory = world.at(pick(own, 0, 1)).arena()->mapping();
      auto& header = *memory.at<ArenaHeader>(0);
      for (auto& entry : header.directory) {
        if (entry.group.load() != 1) continue;
        const std::uint64_t offset = entry.offset.load();
        if (!memory.holds(offset, block)) continue;
        const auto word = static_cast<std::uint64_t>(pick(own, 0, static_cast<int>(block / 8) - 1));
        const bool low = chance(own, 2);  // the location of counters and tables
        std::uint64_t& at = *memory.at<std::uint64_t>(offset + (low ? word % 48 : word) * 8);
        const std::uint64_t old = __atomic_load_n(&at, __ATOMIC_RELAXED);
        const int what = pick(own, 0, 4);
        const std::uint64_t value = what == 0 ? own()
                                    : what == 1
                                        ? memory.length() - static_cast<std::uint64_t>(pick(own, 0, 4096))
                                    : what == 2 ? old + static_cast<std::uint64_t>(pick(own, 0, 5000))
                                    : what == 3 ? old ^ (1ULL << pick(own, 0, 63))
                                                : 0;
        __atomic_store_n(&at, value, __ATOMIC_RELAXED);
        if (chance(own, 50)) entry.offset.store(own());
        if (chance(own, 100))
          header.life.holder.store(chance(own, 2) ? FUTEX_OWNER_DIED : static_cast<std::uint32_t>(own()));
      }
      nap(own, 0, 30);
    }
  });
  run_ranks(2, [&](int rank) {
    Group& group = *groups[rank];
    auto& mine = data[rank];
    Desk& desk = watchdog.desk(rank);
    desk.doing("memory that another writes to", &group);
    for (std::uint64_t number = 0; number < 50 && !group.broken(); ++number) {
      Request request(number % 2 ? Kind::kBroadcast : Kind::kAllReduce, collectives::start);
      request.channel = number;
      request.root = number % 2 ? 0 : -1;
      request.reduction = {DType::kFloat32, RedOp::kSum, 2};
      request.count = mine.size() / 4;
      request.in.push_back({mine.data(), mine.size()});
      request.out = request.in;
      request.timeout = kPatience;
      auto operation = group.submit(std::move(request));
      desk.begun(operation);
      if (!world.at(rank).wait(*operation, now_ns() + kSecond / 5)) group.abort("the stress test aborts");
      check(world.at(rank).wait(*operation, now_ns() + 60 * kSecond), "an operation hangs");
      desk.ended(operation);
    }
    group.abort("the stress test aborts");
  });
  over = true;
  hand.join();
  for (int rank : {0, 1}) groups[rank]->close(now_ns());
  for (int rank : {0, 1}) world.at(rank).close(now_ns() + kSecond);
}

}  // namespace

std::uint64_t hostile(std::uint64_t seed, std::uint64_t count, Watchdog& watchdog, Tally& tally) {
  Random random(seed);
  std::uint64_t sent = 0;
  while (sent < count) sent += frames(random, count - sent, watchdog, tally);
  scribble(random, watchdog, tally);
  return sent;
}

}  // namespace shoal::stress
