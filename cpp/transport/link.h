// A link carries frames between this process and one peer, whatever lies below (a socket, or a pair of
// rings).
//
// Any thread may send; whoever gets the receive lock reads.  Nothing here blocks.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/frame.h"

namespace shoal {

// A message on its way out.  `data` must stay valid until `done`, or until the link has cancelled it.
struct Outgoing {
  FrameHeader header;
  const std::byte* data = nullptr;
  std::uint64_t cursor = 0;  // bytes handed to frames
  bool begun = false;        // the receiver has its header
  std::atomic<bool> done{false};
};

// A receive: posted by an operation, filled by a link.
struct Incoming {
  enum State : int { kPosted, kMatched, kDone, kRefused };
  std::uint64_t group = 0;
  std::uint64_t channel = 0;
  std::uint32_t step = 0;
  std::int32_t source = -1;  // group rank; -1: any
  std::byte* data = nullptr;
  std::uint64_t capacity = 0;
  bool allocate = false;   // no buffer: take whatever arrives
  Fingerprint call;        // collectives: what the sender must claim
  std::uint8_t dtype = 0;  // point to point, with a buffer: what the sender must send
  // filled in by the match
  FrameHeader header;
  std::uint64_t received = 0;
  std::unique_ptr<std::byte[]> owned;
  std::atomic<int> state{kPosted};
  std::atomic<std::int32_t> from{-1};  // the group rank whose message it was matched with; -1: none yet
  bool cancelled = false;              // under the messenger's lock: it is never matched again
  std::atomic<class Link*> link{nullptr};
};

// Where the link puts the payload of a frame, decided when its header has arrived.
struct Destination {
  std::byte* data = nullptr;  // null: discard
  std::shared_ptr<Incoming> incoming;
};

// Why a link ended: the peer is gone, or it broke the rules.
enum class LinkEnd { kGone, kRefused };

struct LetterState;

class FrameSink {
 public:
  virtual ~FrameSink() = default;
  // The letters of a link are checked against it; null: the link carries a group's frames and no letters.
  virtual const LetterState* letters(Link&) { return nullptr; }
  virtual Destination on_header(Link& link, const FrameHeader& header) = 0;
  virtual void on_frame(Link& link, const FrameHeader& header, const Destination& destination) = 0;
  virtual void on_link_lost(Link& link, LinkEnd end, const char* why) = 0;
  virtual void on_sent() = 0;  // an Outgoing finished
};

// The part of a link's window that one unread message takes up: given back to the peer by the destructor, so
// that no way of reading or dropping a message can forget it.
class Charge {
 public:
  Charge() = default;
  Charge(Link& link, std::uint64_t bytes) : link_(&link), bytes_(bytes) {}
  Charge(Charge&& other) noexcept
      : link_(std::exchange(other.link_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Charge& operator=(Charge&& other) noexcept {
    std::swap(link_, other.link_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Charge();

 private:
  Link* link_ = nullptr;
  std::uint64_t bytes_ = 0;
};

class Link {
 public:
  Link(int peer, FrameSink& sink) : peer_(peer), sink_(sink) {}
  virtual ~Link() { broken_.store(true); }  // the charge of a message half read goes nowhere
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int peer() const { return peer_; }
  bool broken() const { return broken_.load(std::memory_order_acquire); }

  void send_control(FrameHeader header, const void* payload = nullptr, std::size_t bytes = 0);
  void send(const std::shared_ptr<Outgoing>& message);
  // Lets go of the sender's memory.  True if the peer gets the whole message all the same; false if what it
  // has of it was taken back.
  bool cancel(const std::shared_ptr<Outgoing>& message);
  void granted(std::uint64_t message, bool declined);
  bool ungranted(const Outgoing& message);
  // Whether the whole message is written; waits for a thread that is writing.
  bool written(const Outgoing& message);
  // The peer gives back so many bytes of its window.
  void credited(std::uint64_t bytes);
  // Bytes of our window that the peer may use again.
  void release(std::uint64_t bytes);
  // Bytes of the peer's window in use, and of ours that we have not given back yet.
  std::uint64_t lent();
  std::uint64_t unread() const { return unread_.load(std::memory_order_relaxed); }

  // Writes what is queued as far as it goes; true if nothing is left.
  bool flush();
  // Nothing is left to send, nor waits for the peer to ask for it.
  bool idle();
  bool backlog() const { return backlog_.load(std::memory_order_relaxed); }
  // Reads and delivers what is there; true if anything was.
  bool receive();
  // Reads until nothing is there, after any other thread that is reading.
  void receive_all();
  // Waits until a thread that is reading has done so.
  void await_reader();
  // From now on nothing is written to the receive's buffer.  `forget`: it is not told of the frame either
  // that is just arriving for it.
  void detach(const Incoming* incoming, bool forget);
  // The charge of the message whose header has just arrived, for who keeps it unread.
  Charge take_charge() { return std::move(charge_); }
  // Asks for the rest of a message, of which `header` was the first frame.
  void ask_for_rest(const FrameHeader& header, std::shared_ptr<Incoming> incoming);
  // Tells the sender that the rest of a message is not wanted: for the sender it has ended well.
  void decline(const FrameHeader& header);
  // The peer counts as lost.  It may live, and is to hear that and not that its messages ended well: they are
  // no longer declined.
  void give_up() { given_up_.store(true, std::memory_order_release); }
  // Forgets that the rest of a message was asked for; the receive that it was for, null if it was given up.
  std::shared_ptr<Incoming> unroute(std::uint64_t message);
  // The receive that a kMore frame belongs to; null if it was given up.
  std::shared_ptr<Incoming> routed(std::uint64_t message);
  // The peer sends no more frames of the group.
  void forget(std::uint64_t group);
  // Ends the link because of what the peer sent.
  void refuse(const char* why) { fail(LinkEnd::kRefused, why); }
  // Ends the link without a word.  Threads that still use it find it broken: its descriptor may be another's
  // soon.
  void close();
  std::int64_t last_heard() const { return last_heard_.load(std::memory_order_relaxed); }

 protected:
  static constexpr std::ptrdiff_t kPeerGone = -1, kCorrupt = -2;
  // Bytes moved; 0: would block; or one of the above.
  virtual std::ptrdiff_t write_some(const iovec* parts, int count) = 0;
  virtual std::ptrdiff_t read_some(std::byte* data, std::size_t bytes) = 0;
  virtual void want_write(bool) {}
  // The link is broken: nobody need be told of what happens on it.
  virtual void unwatch() {}
  // Bytes were taken from the peer that nobody has read yet: no event will tell of them.
  virtual bool holds_bytes() const { return false; }
  virtual void let_go() {}
  std::atomic<std::int64_t> last_heard_{0};

 private:
  struct Item {
    FrameHeader header;
    std::vector<std::byte> owned;
    const std::byte* data = nullptr;  // into `owned` or the message
    std::size_t bytes = 0;
    std::size_t written = 0;  // of header and data together
    std::shared_ptr<Outgoing> message;
    bool last = false;
  };
  // A message whose rest was asked for; its receive is null once that was given up.
  struct Route {
    FrameHeader header;
    std::uint64_t arrived = 0;
    std::shared_ptr<Incoming> incoming;
  };
  enum class Push { kAll, kBlocked, kBroken };
  Push push(Item& item);
  void finish(Item& item);
  Item first_chunk(const std::shared_ptr<Outgoing>& message);
  Item next_chunk(const std::shared_ptr<Outgoing>& message);
  bool flush_locked();
  bool flush_queues();
  bool receive_some();
  void receive_missed();
  bool failed(std::ptrdiff_t moved);
  bool accept_header();
  void accept_payload();
  void fail(LinkEnd end, const char* why);

  const int peer_;
  FrameSink& sink_;
  std::atomic<bool> broken_{false};
  std::atomic<bool> given_up_{false};
  std::atomic<bool> backlog_{false};

  std::mutex send_mutex_;
  std::deque<Item> queue_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Outgoing>> awaiting_grant_;
  std::deque<std::shared_ptr<Outgoing>> bulk_;
  std::uint64_t next_message_ = 1;
  std::uint64_t lent_ = 0;

  std::mutex receive_mutex_;
  std::atomic<bool> missed_{false};  // somebody found another thread reading
  FrameHeader header_;
  std::size_t header_filled_ = 0;
  std::size_t payload_filled_ = 0;
  Destination destination_;
  std::mutex route_mutex_;
  std::unordered_map<std::uint64_t, Route> routes_;
  std::uint64_t arrived_ = 0;             // messages
  Charge charge_;                         // of the message being read
  std::atomic<std::uint64_t> unread_{0};  // bytes charged and not given back to the peer
  std::atomic<std::uint64_t> read_{0};    // of these, bytes to be given back with the next kCredit
};

}  // namespace shoal
