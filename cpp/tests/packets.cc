// Peers of an endpoint that violate the protocol and write to memory of others.

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "rpc/endpoint.h"
#include "tests/scenes.h"
#include "tests/support.h"

namespace shoal::stress {
namespace {

constexpr std::uint64_t kBudget = 1 << 20;
constexpr std::uint32_t kOrdered = 7;

using Bytes = std::vector<std::byte>;

void write_all(int fd, const void* data, std::size_t bytes) {
  auto at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(fd, at, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return;  // refused
    at += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
}

// Communicates with an endpoint as an honest peer would, except for some wrong bits.  It lends memory, and
// writes to memory that is lent to it.
class Liar {
 public:
  Liar(RpcEndpoint& victim, Random& random) : victim_(victim), random_(random) {
    const int memory = victim.memory();
    borrowed_ = std::make_unique<Mapping>(memory, kBudget);
    ::close(memory);
    const auto ends = connected_sockets();
    name_ = victim.attach(ends[0], getpid(), 1, dup(arena_.fd()));
    fd_ = ends[1];
    reader_ = std::thread([fd = fd_] {
      char bytes[4096];
      while (read(fd, bytes, sizeof bytes) > 0) {
      }
    });
  }
  ~Liar() {
    shutdown(fd_, SHUT_RDWR);
    reader_.join();
    ::close(fd_);
  }
  int name() const { return name_; }
  bool refused() { return victim_.lost(name_).has_value(); }

  // Sends a packet with its parts, or a control frame; `lie`: with an error.  Returns the number of frames.
  std::uint64_t speak(bool lie) {
    frames_ = 0;
    lie_in_ = lie ? pick(random_, 0, 4) : -1;
    if (lie && chance(random_, 4)) return_what_it_never_had();
    const int what = pick(random_, 0, 9);
    FrameHeader header;
    if (what == 0) {
      header.type = FrameType::kHeartbeat;
      frame(header, {});
    } else if (what == 1 && call_ > 0) {
      header.type = chance(random_, 2) ? FrameType::kAskCall : FrameType::kCancelCall;
      header.channel = static_cast<std::uint64_t>(pick(random_, 1, static_cast<int>(call_) + 1));
      frame(header, {});
    } else if (what == 2 && lie) {  // always an error: nothing was asked or granted
      constexpr FrameType kTypes[] = {FrameType::kMore,      FrameType::kGrant,      FrameType::kTellCall,
                                      FrameType::kCredit,    FrameType::kWithdrawn,  FrameType::kBroken,
                                      FrameType::kCallQuery, FrameType::kGroupClosed};
      header.type = kTypes[pick(random_, 0, 7)];
      header.channel = random_() % 5;
      header.message = random_() % 5;
      header.total = random_() % 5;
      frame(header, Bytes(random_() % 3));
    } else {
      packet();
    }
    return frames_;
  }

 private:
  void packet() {
    const Bytes head(random_() % 200);
    const auto parts = static_cast<std::size_t>(pick(random_, 0, 3));
    std::vector<std::uint64_t> sizes(parts);
    for (auto& size : sizes)
      size = chance(random_, 3) ? kInsideLimit + 1 + random_() % 2000 : random_() % 300;
    FrameHeader header;
    PacketFields& fields = header.packet;
    const bool call = chance(random_, 2);
    fields.verb = call ? Verb::kCall : Verb::kPost;
    fields.parts = static_cast<std::uint16_t>(parts);
    fields.head = static_cast<std::uint32_t>(head.size());
    fields.mailbox = call || chance(random_, 2) ? 0 : kOrdered;
    if (call) header.channel = ++call_;
    if (call && chance(random_, 2)) fields.deadline_ms = static_cast<std::uint32_t>(pick(random_, 1, 1000));
    Bytes payload(parts * sizeof(layout::Entry));
    payload.insert(payload.end(), head.begin(), head.end());
    for (std::size_t i = 0; i < parts; ++i) {
      const bool apart = sizes[i] > kInsideLimit;
      fields.apart += apart;
      layout::Entry entry{sizes[i], apart ? layout::kApart : layout::kInside};
      if (lie_in_ == 3 && chance(random_, 2)) (chance(random_, 2) ? entry.bytes : entry.place) = odd();
      std::memcpy(payload.data() + i * sizeof entry, &entry, sizeof entry);
      if (!apart) payload.resize(layout::aligned(payload.size()) + sizes[i]);
    }
    header.type = FrameType::kMessage;
    header.message = ++message_;
    header.total = payload.size();
    frame(header, payload);
    std::uint32_t step = 0;
    for (std::uint64_t size : sizes) {
      if (size <= kInsideLimit) continue;
      FrameHeader part;
      part.type = FrameType::kMessage;
      part.channel = header.channel;
      part.packet.verb = Verb::kPart;
      part.message = ++message_;
      part.step = step++;
      part.total = size;
      const bool lent = chance(random_, 2) && lend(part);
      frame(part, Bytes(lent ? 0 : size));
    }
  }

  // Lends the part if there is room; returned memory is free again.
  bool lend(FrameHeader& part) {
    std::erase_if(places_, [&](std::uint64_t place) {
      const bool back = word(place).load() == 0;
      if (back) arena_.release(place);
      return back;
    });
    const std::uint64_t last = places_.empty() ? 0 : places_.back();
    try {
      part.loan.place = arena_.allocate(4096 + part.total);
    } catch (const OutOfMemory&) {
      return false;
    }
    places_.push_back(part.loan.place);
    part.code = kSharedBuffer;
    word(part.loan.place) = part.loan.number = ++loans_;
    if (lie_in_ == 4) switch (pick(random_, 0, 4)) {
        case 0:
          part.loan.place = odd();
          break;
        case 1:
          part.loan.number = odd();
          break;
        case 2:
          part.total = std::max<std::uint64_t>(odd(), 1);
          break;
        case 3:  // memory that is already lent, or overlaps such memory
          part.loan.place = last + 2048 * (random_() % 5);
          break;
        default:
          word(part.loan.place) = odd();
      }
    return true;
  }
  // Blocks begin with pages; some of these words belong to blocks of other peers.
  void return_what_it_never_had() {
    for (std::uint64_t place = 0; place < kBudget; place += 4096)
      if (chance(random_, 2))
        *borrowed_->at<std::atomic<std::uint64_t>>(place) = chance(random_, 2) ? 0 : odd();
  }
  std::atomic<std::uint64_t>& word(std::uint64_t place) {
    return *arena_.mapping().at<std::atomic<std::uint64_t>>(place);
  }

  std::uint64_t odd() {
    constexpr std::uint64_t kOdd[] = {0, 1, 1ULL << 31, 1ULL << 32, kLongest, ~0ULL >> 1, ~0ULL - 1, ~0ULL};
    return chance(random_, 2) ? kOdd[random_() % 8] : random_() >> (random_() % 64);
  }

  void frame(FrameHeader header, const Bytes& payload) {
    header.payload = static_cast<std::uint32_t>(payload.size());
    if (lie_in_ >= 0 && lie_in_ < 3) {
      auto bytes = reinterpret_cast<unsigned char*>(&header);
      if (lie_in_ == 0) {
        bytes[random_() % sizeof header] ^= static_cast<unsigned char>(1u << (random_() % 8));
      } else if (lie_in_ == 1) {
        const std::uint64_t value = odd();
        std::memcpy(bytes + random_() % (sizeof header / 8) * 8, &value, 8);
      } else if (chance(random_, 2)) {
        header.type = static_cast<FrameType>(random_() % 20);
      } else {
        PacketFields& fields = header.packet;
        std::uint16_t* fields16[] = {&fields.flags, &fields.parts, &fields.apart};
        std::uint32_t* fields32[] = {&fields.mailbox, &fields.deadline_ms, &fields.head};
        if (chance(random_, 2))
          *fields16[random_() % 3] = static_cast<std::uint16_t>(odd());
        else
          *fields32[random_() % 3] = static_cast<std::uint32_t>(odd());
      }
      lie_in_ = -1;
    }
    ++frames_;
    write_all(fd_, &header, sizeof header);
    write_all(fd_, payload.data(), payload.size());
  }

  RpcEndpoint& victim_;
  Random& random_;
  Arena arena_{1 << 20, 1 << 20};
  std::unique_ptr<Mapping> borrowed_;
  std::vector<std::uint64_t> places_;  // of lent blocks
  std::uint64_t loans_ = 0;
  int name_ = 0, fd_ = -1, lie_in_ = -1;
  std::uint64_t message_ = 0, call_ = 0, frames_ = 0;
  std::thread reader_;
};

}  // namespace

std::uint64_t lies(std::uint64_t seed, std::uint64_t count, Tally& tally) {
  Random random(seed);
  auto endpoint = std::make_shared<RpcEndpoint>(RpcEndpoint::Options{kBudget, 600 * kSecond});
  endpoint->inbox().open(kOrdered);
  std::thread handler([&] {
    const auto large = std::make_shared<Bytes>(2 * kEager);
    const PartToSend part{large->data(), large->size()};
    std::vector<PacketPtr> packets;
    while (endpoint->inbox().take(0, now_ns() + kSecond, 4, packets)) {
      for (auto& packet : packets) {
        packet->taken();
        PacketFields fields;
        fields.verb = Verb::kReply;
        endpoint->reply(*packet, {fields, packet->head(), {&part, packet->call % 2}, large});
      }
      packets.clear();
    }
  });
  std::thread reader([&] {
    std::vector<PacketPtr> packets;
    while (endpoint->inbox().take(kOrdered, now_ns() + kSecond, 4, packets)) {
      for (auto& packet : packets) packet->taken();
      packets.clear();
    }
  });
  std::uint64_t sent = 0;
  while (sent < count) {
    Liar liar(*endpoint, random);
    for (int i = pick(random, 0, 20); i > 0; --i) sent += liar.speak(false);
    // The honest part was taken, unless it is still being read.
    check(!liar.refused(), "an honest peer was refused: " + endpoint->lost(liar.name()).value_or(""));
    for (int i = 0; i < 10 && !liar.refused(); ++i) sent += liar.speak(true);
    tally.failures += liar.refused();
  }
  endpoint->close(now_ns());
  handler.join();
  reader.join();
  return sent;
}

}  // namespace shoal::stress
