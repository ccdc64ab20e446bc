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
#include <vector>

#include "transport/frame.h"

namespace shoal {

// A message on its way out.  `data` must stay valid until `done`, or until the link has cancelled it.
struct Outgoing {
  FrameHeader header;
  const std::byte* data = nullptr;
  std::uint64_t cursor = 0;  // bytes handed to frames
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
  std::atomic<class Link*> link{nullptr};
};

// Where the link puts the payload of a frame, decided when its header has arrived.
struct Destination {
  std::byte* data = nullptr;  // null: discard
  std::shared_ptr<Incoming> incoming;
};

class FrameSink {
 public:
  virtual ~FrameSink() = default;
  virtual Destination on_header(Link& link, const FrameHeader& header) = 0;
  virtual void on_frame(Link& link, const FrameHeader& header, const Destination& destination) = 0;
  virtual void on_link_lost(Link& link, const char* why) = 0;
  virtual void on_sent() = 0;  // an Outgoing finished
};

class Link {
 public:
  Link(int peer, FrameSink& sink) : peer_(peer), sink_(sink) {}
  virtual ~Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int peer() const { return peer_; }
  bool broken() const { return broken_.load(std::memory_order_acquire); }

  void send_control(FrameHeader header, const void* payload = nullptr, std::size_t bytes = 0);
  void send(const std::shared_ptr<Outgoing>& message);
  void cancel(const std::shared_ptr<Outgoing>& message);
  void granted(std::uint64_t message);
  bool ungranted(const Outgoing& message);

  // Writes what is queued as far as it goes; true if nothing is left.
  bool flush();
  bool idle();
  bool backlog() const { return backlog_.load(std::memory_order_relaxed); }
  // Reads and delivers what is there; true if anything was.
  bool receive();
  // Reads until nothing is there, after any other thread that is reading.
  void receive_all();
  // From now on nothing is written to the receive's buffer.
  void detach(const Incoming* incoming);
  // Route the kMore frames of a message to its buffer.
  void route(std::uint64_t message, std::shared_ptr<Incoming> incoming);
  // The receive that a kMore frame belongs to (null if it was given up), removed when it is the last.
  std::shared_ptr<Incoming> routed(std::uint64_t message, bool last);
  void fail(const char* why);
  // Ends the link without a word.  Threads that still use it find it broken: its descriptor may be another's
  // soon.
  void close();
  std::int64_t last_heard() const { return last_heard_.load(std::memory_order_relaxed); }

 protected:
  // Bytes moved; 0: would block; -1: the peer is gone.
  virtual std::ptrdiff_t write_some(const iovec* parts, int count) = 0;
  virtual std::ptrdiff_t read_some(std::byte* data, std::size_t bytes) = 0;
  virtual void want_write(bool) {}
  // The link is broken: nobody need be told of what happens on it.
  virtual void unwatch() {}
  // Bytes were taken from the peer that nobody has read yet: no event will tell of them.
  virtual bool holds_bytes() const { return false; }
  virtual void release() {}
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
  enum class Push { kAll, kBlocked, kBroken };
  Push push(Item& item);
  void finish(Item& item);
  Item next_chunk(const std::shared_ptr<Outgoing>& message);
  bool flush_locked();
  bool flush_queues();
  bool receive_some();

  const int peer_;
  FrameSink& sink_;
  std::atomic<bool> broken_{false};
  std::atomic<bool> backlog_{false};

  std::mutex send_mutex_;
  std::deque<Item> queue_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Outgoing>> awaiting_grant_;
  std::deque<std::shared_ptr<Outgoing>> bulk_;
  std::uint64_t next_message_ = 1;

  std::mutex receive_mutex_;
  std::atomic<bool> missed_{false};  // somebody found another thread reading
  FrameHeader header_;
  std::size_t header_filled_ = 0;
  std::size_t payload_filled_ = 0;
  Destination destination_;
  std::mutex route_mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Incoming>> routes_;
};

}  // namespace shoal
