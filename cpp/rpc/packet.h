// Sent and received packets, and their calls.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "common/tickets.h"
#include "net/link.h"
#include "rpc/latch.h"
#include "rpc/shared_buffers.h"

namespace shoal {

constexpr std::size_t kInsideLimit = 16 * 1024;  // longer parts are sent separately
constexpr std::size_t kNoteLimit = 200;          // bytes of a handler's description

// -- sent -----------------------------------------------------------------------------------------

struct PartToSend {
  const std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};

// The contents of a packet; `keep` owns the memory of its parts.
struct PacketContents {
  PacketFields fields;
  std::span<const std::byte> head;
  std::span<const PartToSend> parts;
  std::shared_ptr<void> keep = {};
};

// An outgoing message and the owners of its memory.
struct OutgoingPart : Outgoing {
  std::unique_ptr<std::byte[]> own;
  std::shared_ptr<void> keep;
  std::unique_ptr<SharedBufferPool::Lease> loan;  // of a lent part
};

// A packet to send: the message of the packet itself, then one for each separate part.
struct OutgoingPacket {
  std::vector<std::shared_ptr<OutgoingPart>> messages;
  std::uint64_t bytes = 0;  // of copied memory
};

// Lends long parts to `peer` as long as there is room, unless `lender` is null.  Throws std::bad_alloc, and
// std::invalid_argument if the contents exceed a packet's limits.
OutgoingPacket compose(const PacketContents& contents, SharedBufferPool* lender, int peer);

// -- received -------------------------------------------------------------------------------------

// One received buffer.
struct Part {
  std::shared_ptr<std::byte> data;
  std::uint64_t bytes = 0;
  bool wanted_back = false;  // the peer that lends the memory asks for a copy
};

// A received call on the callee's side, from its first frame until it is answered.
class ReceivedCall {
 public:
  enum State { kArriving, kQueued, kRunning, kAnswered };

  explicit ReceivedCall(std::int64_t deadline) : deadline_(deadline) {}

  std::int64_t deadline() const { return deadline_; }  // ns; 0: none
  bool overdue(std::int64_t now) const { return deadline_ != 0 && now >= deadline_; }
  bool cancelled() const { return reply_unwanted_.load(std::memory_order_acquire) || overdue(now_ns()); }
  bool is_reply_unwanted() const { return reply_unwanted_.load(std::memory_order_acquire); }
  State state();
  // Changes the state if it is `from`; otherwise returns false.
  bool advance(State from, State to);
  // The reply is no longer wanted.
  void withdraw_reply(Tickets& tickets);
  bool announce(std::int64_t ticket);
  void describe(std::string text);
  // Text such as "running for 3.2 s in fn".
  std::string running(std::int64_t now);
  // For lists of running calls.
  struct Status {
    State state;
    std::int64_t began;  // ns; 0: not begun
    std::string note;
  };
  Status status();

 private:
  const std::int64_t deadline_;
  std::atomic<bool> reply_unwanted_{false};
  std::mutex mutex_;
  State state_ = kArriving;
  std::int64_t began_ = 0;
  std::int64_t ticket_ = -1;
  std::string note_;
};

// A received packet.
struct Packet {
  int peer = 0;
  std::uint64_t call = 0;
  FrameHeader header;
  std::shared_ptr<std::byte> body;
  std::vector<Part> parts;
  std::shared_ptr<ReceivedCall> handling;  // of a call
  std::uint64_t place = 0;                 // in its inbox
  std::int64_t arrived = 0;
  std::uint64_t taken_before = 0;  // packets of mailbox 0 taken before this one arrived
  // The room that it uses until a handler takes it; `owner` keeps the charges' link alive.
  std::shared_ptr<void> owner;
  std::vector<Charge> charges;
  std::vector<std::shared_ptr<void>> grants;  // of the budget

  Verb verb() const { return header.packet.verb; }
  std::span<const std::byte> head() const {
    return {body.get() + layout::head_at(header.packet), header.packet.head};
  }
  void taken() {
    charges.clear();
    grants.clear();
    owner.reset();
  }
};
using PacketPtr = std::shared_ptr<Packet>;

// Fills in the parts of a complete packet, in order; returns its flaw, or null.
const char* unfold(Packet& packet, const std::vector<Part>& apart);

// -- calls made -----------------------------------------------------------------------------------

enum class CallEnd : int {
  kNone = 0,
  kTimeout = 1,
  kCancelled = 2,
  kLost = 3,
  kClosed = 4,
  kRefused = 5,
  kUnsent = 6,  // the data to send was not available
};

class Call {
 public:
  Call(int peer, std::int64_t deadline, std::string shown)
      : peer(peer), deadline(deadline), shown(std::move(shown)), began(now_ns()) {}

  const int peer;
  const std::int64_t deadline;  // ns; 0: none
  const std::string shown;      // for lists of pending calls
  const std::int64_t began;     // ns
  std::int64_t due = 0;         // when the endpoint checks it; requires the lock of the deadlines
  // Set before other threads see the call, and again if calls that were made later are sent before it.
  std::atomic<std::uint64_t> number{0};
  std::uint64_t unique = 0;     // in this endpoint
  std::uint64_t queued_at = 0;  // its place in the peer's outbox, or 0; requires the peer's lock

  bool done() const { return ended_.is_open(); }
  // Waits until `until` (ns) or a signal.
  bool wait(std::int64_t until) { return ended_.wait(until); }
  // True if the call has already ended; otherwise the ticket becomes due when it does.
  bool announce(std::int64_t ticket);
  // The same, for a ticket that becomes due only if the call fails on either side, or its reply has one of
  // `flags`.
  bool announce_failure(std::int64_t ticket, std::uint16_t flags);
  std::pair<CallEnd, std::string> error();
  PacketPtr take_reply();

  // For the endpoint: exactly one `claim` succeeds, and its caller must call `end`.
  bool claim() { return !claimed_.exchange(true, std::memory_order_acq_rel); }
  bool claimed() const { return claimed_.load(std::memory_order_acquire); }
  void end(CallEnd how, std::string text, PacketPtr reply, Tickets& tickets);
  std::atomic<bool> asked{false};  // the callee was asked for its status after the deadline
  // The messages that may still read the caller's memory, until the call ends.
  void sent(std::vector<std::shared_ptr<OutgoingPart>> apart);
  std::vector<std::shared_ptr<OutgoingPart>> take_sent();

 private:
  Latch ended_;
  std::atomic<bool> claimed_{false};
  std::mutex mutex_;
  CallEnd how_ = CallEnd::kNone;
  std::string text_;
  PacketPtr reply_;
  std::int64_t ticket_ = -1, failure_ticket_ = -1;
  std::uint16_t flags_ = 0;
  std::vector<std::shared_ptr<OutgoingPart>> apart_;
};
using CallPtr = std::shared_ptr<Call>;

}  // namespace shoal
