// A link carries frames between this process and one peer, over a socket or a pair of rings.
//
// Any thread may send; the thread that gets the receive lock reads.  Nothing here blocks.
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

#include "net/frame.h"

namespace shoal {

// An outgoing message.  `data` must stay valid until `done`, or until the link has cancelled it.
struct Outgoing {
  FrameHeader header;
  const std::byte* data = nullptr;
  std::uint64_t cursor = 0;  // bytes already put into frames
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
  bool allocate = false;   // no buffer: accept any message
  Fingerprint call;        // collectives: the expected call of the sender
  std::uint8_t dtype = 0;  // point to point, with a buffer: the expected dtype
  // filled in by the match
  FrameHeader header;
  std::uint64_t received = 0;
  std::shared_ptr<std::byte> owned;
  std::atomic<int> state{kPosted};
  std::atomic<std::int32_t> from{-1};  // group rank of the matched message's sender; -1: not matched
  bool cancelled = false;              // guarded by the messenger's lock: it is never matched again
  std::atomic<class Link*> link{nullptr};
};

// The destination of a frame's payload, selected when its header has arrived.
struct Destination {
  std::byte* data = nullptr;  // null: discard
  std::shared_ptr<Incoming> incoming;
};

// Why a link ended: the peer closed it, or it violated the protocol.
enum class LinkEnd { kClosed, kRefused };

struct PacketState;

class FrameSink {
 public:
  virtual ~FrameSink() = default;
  // The state against which packets are checked; null: the link carries a group's frames and no packets.
  virtual const PacketState* packets(Link&) { return nullptr; }
  virtual Destination on_header(Link& link, const FrameHeader& header) = 0;
  virtual void on_frame(Link& link, const FrameHeader& header, const Destination& destination) = 0;
  virtual void on_link_lost(Link& link, LinkEnd end, const char* why) = 0;
  virtual void on_sent() = 0;  // an Outgoing is done
};

// The part of a link's window that one unread message uses.  The destructor returns it to the peer, on every
// path on which a message is read or dropped.
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
  virtual ~Link() { broken_.store(true); }  // so that the charge of a partly read message is not returned
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int peer() const { return peer_; }
  bool broken() const { return broken_.load(std::memory_order_acquire); }

  void send_control(FrameHeader header, const void* payload = nullptr, std::size_t bytes = 0);
  void send(const std::shared_ptr<Outgoing>& message);
  // Releases the sender's memory.  True if the peer gets the whole message anyway, false if it was withdrawn.
  bool cancel(const std::shared_ptr<Outgoing>& message);
  void granted(std::uint64_t message, bool declined);
  bool ungranted(const Outgoing& message);
  // Whether the whole message is written; waits for a thread that is writing.
  bool written(const Outgoing& message);
  // The peer returned this many bytes of its window.
  void credited(std::uint64_t bytes);
  // Returns bytes of this process's window to the peer.
  void release(std::uint64_t bytes);
  // Bytes of the peer's window in use, and bytes of this process's window that were not returned yet.
  std::uint64_t lent();
  std::uint64_t unread() const { return unread_.load(std::memory_order_relaxed); }

  // Writes as much of the queue as possible; true if nothing is left.
  bool flush();
  // Whether nothing is left to send and no message waits for a grant.
  bool idle();
  bool backlog() const { return backlog_.load(std::memory_order_relaxed); }
  // Reads and delivers available frames; true if there were any.
  bool receive();
  // Reads until no data is available, after any other thread that is reading.
  void receive_all();
  // Waits for a thread that is reading.
  void await_reader();
  // Stops writing to the receive's buffer; with `forget`, ignores even the frame that is just arriving for
  // it.
  void detach(const Incoming* incoming, bool forget);
  // Takes over the charge of the message whose header has just arrived, to keep the message unread.
  Charge take_charge() { return std::move(charge_); }
  // Requests the rest of a message; `header` is its first frame.
  void ask_for_rest(const FrameHeader& header, std::shared_ptr<Incoming> incoming);
  // Declines the rest of a message: for the sender, the message has completed.
  void decline(const FrameHeader& header);
  // The peer is lost.  If it still runs, its messages must fail, so they are no longer declined (that would
  // complete them).
  void give_up() { given_up_.store(true, std::memory_order_release); }
  // Removes the request for the rest of a message; returns its receive, null if that was cancelled.
  std::shared_ptr<Incoming> unroute(std::uint64_t message);
  // The receive of a kMore frame; null if it was cancelled.
  std::shared_ptr<Incoming> routed(std::uint64_t message);
  // The peer sends no more frames of the group.
  void forget(std::uint64_t group);
  // Ends the link because of the peer's data.
  void refuse(const char* why) { fail(LinkEnd::kRefused, why); }
  // Ends the link without notifying the peer.  Other threads find it broken and do not use its descriptor.
  void close();
  std::int64_t last_heard() const { return last_heard_.load(std::memory_order_relaxed); }

 protected:
  static constexpr std::ptrdiff_t kPeerClosed = -1, kCorrupt = -2;
  // Return the number of bytes moved; 0: would block; or one of the above.
  virtual std::ptrdiff_t write_some(const iovec* parts, int count) = 0;
  virtual std::ptrdiff_t read_some(std::byte* data, std::size_t bytes) = 0;
  virtual void want_write(bool) {}
  // The link is broken: no more events of it are needed.
  virtual void unwatch() {}
  // Bytes were taken from the socket that have not been read from the link: no event will announce them.
  virtual bool holds_bytes() const { return false; }
  virtual void release_descriptor() {}
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
  // A message with a requested rest; `incoming` is null when its receive was cancelled.
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
  void answer(std::uint64_t message, Answer answer);

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
  std::atomic<bool> missed_{false};  // a thread found another thread reading
  FrameHeader header_;
  std::size_t header_filled_ = 0;
  std::size_t payload_filled_ = 0;
  Destination destination_;
  std::mutex route_mutex_;
  std::unordered_map<std::uint64_t, Route> routes_;
  std::uint64_t arrived_ = 0;             // messages
  Charge charge_;                         // of the message being read
  std::atomic<std::uint64_t> unread_{0};  // bytes charged and not yet returned to the peer
  std::atomic<std::uint64_t> read_{0};    // of these, bytes to return with the next kCredit
};

}  // namespace shoal
