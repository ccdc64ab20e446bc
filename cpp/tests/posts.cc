// Posts that call one another at random, and peers of a post that do not keep the protocol.
//
// In a round of calls, connections are cut and made again, calls are cancelled and time out, handlers answer
// late or never, and posts are closed, all at random times.  Every call must end, every reply must be the one
// to its call, and the letters of an ordered mailbox must come in order.

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "post/post.h"
#include "tests/scenes.h"
#include "tests/support.h"

namespace shoal::stress {
namespace {

constexpr std::uint64_t kBudget = 1 << 20;
constexpr std::uint32_t kOrdered = 7;

using Bytes = std::vector<std::byte>;

std::span<const std::byte> view(const Bytes& bytes) { return bytes; }

// Bytes that tell whose they are, of any of the sizes that make a difference.
Bytes random_bytes(Random& random) {
  constexpr std::size_t kSizes[] = {0, 1, 100, kInsideLimit, kInsideLimit + 1, kEager, kEager + 1, 700'000};
  Bytes bytes(kSizes[static_cast<std::size_t>(pick(random, 0, chance(random, 8) ? 7 : 4))]);
  const auto fill = static_cast<std::byte>(random());
  std::fill(bytes.begin(), bytes.end(), fill);
  return bytes;
}

// One post with the threads that use it.
class Station {
 public:
  explicit Station(std::uint64_t seed)
      : post(std::make_shared<Post>(Post::Options{kBudget, 600 * kSecond})), seed_(seed) {
    post->inbox().open(kOrdered);
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
    post->close(now_ns() + patience);
    for (auto& thread : threads_) thread.join();
    const auto stats = post->stats();
    check(stats.peers == 0 && stats.calls == 0 && stats.handled == 0, "a closed post holds something");
  }

  std::shared_ptr<Post> post;
  std::atomic<std::uint64_t> answered{0}, failed{0};

 private:
  void handle(Random random) {
    while (true) {
      std::vector<LetterPtr> letters;
      if (!post->inbox().take(0, now_ns() + kSecond, static_cast<std::size_t>(pick(random, 1, 3)), letters))
        return;
      for (auto& letter : letters) {
        letter->taken();
        dawdle(random);
        if (chance(random, 60)) {
          post->abandon(*letter);
          continue;
        }
        if (chance(random, 10)) letter->handling->describe("a handler");
        LetterFields fields;
        fields.verb = chance(random, 10) ? Verb::kFailure : Verb::kReply;
        std::vector<PartToSend> parts;
        for (const Part& part : letter->parts) parts.push_back({part.data.get(), part.bytes});
        post->reply(*letter, fields, letter->head(), parts, letter);
      }
    }
  }

  // The letters say which caller's they are and count upwards; only a cut leaves gaps.
  void read_in_order() {
    std::map<std::pair<int, std::uint64_t>, std::uint64_t> last;
    while (true) {
      std::vector<LetterPtr> letters;
      if (!post->inbox().take(kOrdered, now_ns() + kSecond, 4, letters)) return;
      for (auto& letter : letters) {
        letter->taken();
        std::uint64_t says[2];
        check(letter->head().size() == sizeof says, "the head of a letter was lost");
        std::memcpy(says, letter->head().data(), sizeof says);
        auto& before = last[{letter->peer, says[0]}];
        check(says[1] > before, "letters of one mailbox out of order");
        before = says[1];
      }
    }
  }

  void count_tickets() {
    std::vector<std::int64_t> due;
    while (post->tickets().wait(now_ns() + kSecond, due)) {
    }
  }

  void finish(const CallPtr& call, const Bytes& head, const std::vector<std::shared_ptr<Bytes>>& parts) {
    while (!call->wait(now_ns() + kSecond)) {  // for ever: hangs are for the watchdog to find
    }
    if (call->error().first != CallEnd::kNone) {
      ++failed;
      return;
    }
    const LetterPtr reply = call->take_reply();
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
      const int peer = names[static_cast<std::size_t>(pick(random, 0, static_cast<int>(names.size()) - 1))];
      if (chance(random, 4)) {
        const std::uint64_t says[2] = {self, ++count};
        const auto bytes = std::make_shared<Bytes>(random_bytes(random));
        const PartToSend part{bytes->data(), bytes->size()};
        LetterFields fields;
        fields.verb = Verb::kPost;
        fields.mailbox = kOrdered;
        if (!post->await_room(peer, bytes->size(), now_ns() + kSecond)) continue;
        if (!chance(random, 3)) {
          post->send(peer, fields, std::as_bytes(std::span(says)), {&part, 1}, bytes);
          continue;
        }
        const auto place = post->hold(peer, kOrdered, 0, false, true);
        held.push_back([=, this, says = std::array{says[0], says[1]}] {
          if (says[1] % 9 == 0)
            post->give_up(place, "its contents never came");
          else
            post->fill(*place, fields, std::as_bytes(std::span(says)), {&part, 1}, bytes);
        });
        continue;
      }
      LetterFields fields;
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
      const bool room = post->await_room(peer, head.size(), now_ns() + patience);
      CallPtr call;
      if (chance(random, 4)) {
        const std::uint64_t staged = head.size();
        const bool counted = post->await_room(peer, staged, now_ns() + patience, true);
        call = post->hold(peer, fields.mailbox, now_ns() + patience, !counted, false);
        held.push_back([=, this, at = pick(random, 0, 9)] {
          if (at == 0)
            post->give_up(call, "its contents never came");
          else
            post->fill(*call, fields, view(head), parts, keep);
          if (counted) post->unstage(peer, staged);
        });
      } else {
        call = post->request(peer, fields, view(head), parts, keep, now_ns() + patience, !room);
      }
      keep.reset();
      if (chance(random, 5)) call->announce(5);
      if (chance(random, 6)) {
        dawdle(random);
        post->cancel(call);
      }
      if (chance(random, 8)) continue;  // nobody waits for it
      fill(0);
      finish(call, head, buffers);
    }
    fill(0);
  }

  const std::uint64_t seed_;
  std::vector<std::thread> threads_, callers_;
};

// -- a peer that lies -------------------------------------------------------------------------------

void write_all(int fd, const void* data, std::size_t bytes) {
  auto at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(fd, at, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return;  // refused
    at += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
}

// Speaks with a post as an honest peer would, but for some bit here and there.
class Liar {
 public:
  Liar(Post& victim, Random& random) : victim_(victim), random_(random) {
    int ends[2];
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "socketpair failed");
    name_ = victim.attach(ends[0], 0, 1);
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

  // A letter with its parts, or a control frame; `lie`: somewhere it is wrong.  Frames sent.
  std::uint64_t speak(bool lie) {
    frames_ = 0;
    lie_in_ = lie ? pick(random_, 0, 3) : -1;
    const int what = pick(random_, 0, 9);
    FrameHeader header;
    if (what == 0) {
      header.type = FrameType::kHeartbeat;
      frame(header, {});
    } else if (what == 1 && call_ > 0) {
      header.type = chance(random_, 2) ? FrameType::kAskCall : FrameType::kCancelCall;
      header.channel = static_cast<std::uint64_t>(pick(random_, 1, static_cast<int>(call_) + 1));
      frame(header, {});
    } else if (what == 2 && lie) {  // what only a lie could be: nothing was asked or granted
      constexpr FrameType kTypes[] = {FrameType::kMore,      FrameType::kGrant,      FrameType::kTellCall,
                                      FrameType::kCredit,    FrameType::kWithdrawn,  FrameType::kBroken,
                                      FrameType::kCallQuery, FrameType::kGroupClosed};
      header.type = kTypes[pick(random_, 0, 7)];
      header.channel = random_() % 5;
      header.message = random_() % 5;
      header.total = random_() % 5;
      frame(header, Bytes(random_() % 3));
    } else {
      letter();
    }
    return frames_;
  }

 private:
  void letter() {
    const Bytes head(random_() % 200);
    const auto parts = static_cast<std::size_t>(pick(random_, 0, 3));
    std::vector<std::uint64_t> sizes(parts);
    for (auto& size : sizes)
      size = chance(random_, 3) ? kInsideLimit + 1 + random_() % 2000 : random_() % 300;
    FrameHeader header;
    LetterFields& fields = header.letter;
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
      part.letter.verb = Verb::kPart;
      part.message = ++message_;
      part.step = step++;
      part.total = size;
      frame(part, Bytes(size));
    }
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
        LetterFields& fields = header.letter;
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

  Post& victim_;
  Random& random_;
  int name_ = 0, fd_ = -1, lie_in_ = -1;
  std::uint64_t message_ = 0, call_ = 0, frames_ = 0;
  std::thread reader_;
};

}  // namespace

void posts(std::uint64_t seed, Tally& tally) {
  Random random(seed);
  constexpr std::size_t kStations = 3;
  std::vector<std::unique_ptr<Station>> stations;
  std::vector<std::vector<std::atomic<int>>> names(kStations);
  for (std::size_t i = 0; i < kStations; ++i) {
    stations.push_back(std::make_unique<Station>(seed * kStations + i));
    names[i] = std::vector<std::atomic<int>>(kStations);
  }
  auto connect = [&](std::size_t from, std::size_t to) {
    int ends[2];
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "socketpair failed");
    try {
      stations[to]->post->attach(ends[1], 0, 2);
    } catch (const std::system_error&) {
      ::close(ends[0]);
      return;
    }
    names[from][to] = stations[from]->post->attach(ends[0], 0, 1);
  };
  for (std::size_t from = 0; from < kStations; ++from)
    for (std::size_t to = 0; to < kStations; ++to) connect(from, to);
  for (std::size_t i = 0; i < kStations; ++i) stations[i]->start(names[i]);
  for (int cut = pick(random, 0, 6); cut > 0; --cut) {
    nap(random, 0, 20'000);
    const auto from = static_cast<std::size_t>(pick(random, 0, kStations - 1));
    const auto to = static_cast<std::size_t>(pick(random, 0, kStations - 1));
    if (chance(random, 2))
      stations[from]->post->sever(names[from][to]);
    else
      stations[from]->post->drop(names[from][to], "the test drops it");
    connect(from, to);
  }
  const bool violent = chance(random, 3);  // some posts end while the others call them
  if (violent) stations[0]->post->close(now_ns() + kSecond / 100);
  for (auto& station : stations) station->join_callers();
  for (auto& station : stations) {
    station->end(violent ? 0 : kSecond);
    tally.collectives += station->answered;
    tally.failures += station->failed;
  }
}

std::uint64_t lies(std::uint64_t seed, std::uint64_t count, Tally& tally) {
  Random random(seed);
  auto post = std::make_shared<Post>(Post::Options{kBudget, 600 * kSecond});
  post->inbox().open(kOrdered);
  std::thread handler([&] {
    std::vector<LetterPtr> letters;
    while (post->inbox().take(0, now_ns() + kSecond, 4, letters)) {
      for (auto& letter : letters) {
        letter->taken();
        LetterFields fields;
        fields.verb = Verb::kReply;
        post->reply(*letter, fields, letter->head(), {}, nullptr);
      }
      letters.clear();
    }
  });
  std::thread reader([&] {
    std::vector<LetterPtr> letters;
    while (post->inbox().take(kOrdered, now_ns() + kSecond, 4, letters)) {
      for (auto& letter : letters) letter->taken();
      letters.clear();
    }
  });
  std::uint64_t sent = 0;
  while (sent < count) {
    Liar liar(*post, random);
    for (int i = pick(random, 0, 20); i > 0; --i) sent += liar.speak(false);
    // The honest part was taken, unless it is still being read.
    check(!liar.refused(), "an honest peer was refused: " + post->lost(liar.name()).value_or(""));
    for (int i = 0; i < 10 && !liar.refused(); ++i) sent += liar.speak(true);
    tally.failures += liar.refused();
  }
  post->close(now_ns());
  handler.join();
  reader.join();
  return sent;
}

}  // namespace shoal::stress
