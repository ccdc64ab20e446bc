// Letters as they are sent and received, and the calls that they belong to.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/tickets.h"
#include "post/budget.h"
#include "post/latch.h"
#include "post/lending.h"
#include "transport/letter.h"
#include "transport/link.h"

namespace shoal {

constexpr std::size_t kInsideLimit = 16 * 1024;  // longer parts travel apart
constexpr std::size_t kNoteLimit = 200;          // bytes of what a handler says of itself

// -- sent -----------------------------------------------------------------------------------------

struct PartToSend {
  const std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};

// A message on its way out with what its memory belongs to.
struct Parcel : Outgoing {
  std::unique_ptr<std::byte[]> own;
  std::shared_ptr<void> keep;
  std::unique_ptr<Lender::Loan> loan;  // of a part that is lent
};

// A letter to send: the message of the letter itself, then one for each part that travels apart.
struct Posting {
  std::vector<std::shared_ptr<Parcel>> messages;
  std::uint64_t bytes = 0;  // of the copied memory
};

// Long parts are lent to `peer`, as long as there is room, unless `lender` is null.  Throws std::bad_alloc,
// and std::invalid_argument for what no letter can hold.
Posting compose(const LetterFields& fields, std::span<const std::byte> head,
                std::span<const PartToSend> parts, std::shared_ptr<void> keep, Lender* lender, int peer);

// -- received -------------------------------------------------------------------------------------

// One received buffer.
struct Part {
  std::shared_ptr<std::byte> data;
  std::uint64_t bytes = 0;
};

// A call that a peer made, as the callee knows it: from its first frame until it is answered.
class Handling {
 public:
  enum State { kArriving, kQueued, kRunning, kAnswered };

  explicit Handling(std::int64_t deadline) : deadline_(deadline) {}

  std::int64_t deadline() const { return deadline_; }  // ns; 0: none
  bool overdue(std::int64_t now) const { return deadline_ != 0 && now >= deadline_; }
  bool cancelled() const { return unwanted_.load(std::memory_order_acquire) || overdue(now_ns()); }
  bool unwanted() const { return unwanted_.load(std::memory_order_acquire); }
  State state();
  // Moves on from `from`; false if it is elsewhere.
  bool advance(State from, State to);
  // Nobody wants the reply any more.
  void unwant(Tickets& tickets);
  bool announce(std::int64_t ticket);
  void describe(std::string text);
  // "running for 3.2 s in fn"
  std::string running(std::int64_t now);
  // For lists of what is handled.
  struct Standing {
    State state;
    std::int64_t began;  // ns; 0: it has not
    std::string note;
  };
  Standing standing();

 private:
  const std::int64_t deadline_;
  std::atomic<bool> unwanted_{false};
  std::mutex mutex_;
  State state_ = kArriving;
  std::int64_t began_ = 0;
  std::int64_t ticket_ = -1;
  std::string note_;
};

// A received letter.
struct Letter {
  int peer = 0;
  std::uint64_t call = 0;
  FrameHeader header;
  std::shared_ptr<std::byte> body;
  std::vector<Part> parts;
  std::shared_ptr<Handling> handling;  // of a call
  std::uint64_t place = 0;             // in its inbox
  std::int64_t arrived = 0;
  std::uint64_t taken_before = 0;  // letters of mailbox 0, until this one came to the inbox
  // The room that it occupies until a handler takes it; `owner` keeps the link that the charges refer to.
  std::shared_ptr<void> owner;
  std::vector<Charge> charges;
  std::vector<Budget::Grant> grants;

  Verb verb() const { return header.letter.verb; }
  std::span<const std::byte> head() const {
    return {body.get() + layout::head_at(header.letter), header.letter.head};
  }
  void taken() {
    charges.clear();
    grants.clear();
    owner.reset();
  }
};
using LetterPtr = std::shared_ptr<Letter>;

// Fills in the parts of a letter of which everything has come, in their order.  Null, or its flaw.
const char* unfold(Letter& letter, const std::vector<Part>& apart);

// -- calls made here ------------------------------------------------------------------------------

enum class CallEnd : int {
  kNone = 0,
  kTimeout = 1,
  kCancelled = 2,
  kLost = 3,
  kClosed = 4,
  kRefused = 5,
  kUnsent = 6,  // what it was to bring could not be had
};

// What the caller says of a call.
struct CallNote {
  std::string shown;           // for lists of what is pending
  std::int64_t function = -1;  // the number by which it names its function; -1: none
};

class Call {
 public:
  Call(int peer, std::int64_t deadline, CallNote note)
      : peer(peer), deadline(deadline), note(std::move(note)), began(now_ns()) {}

  const int peer;
  const std::int64_t deadline;  // ns; 0: none
  const CallNote note;
  const std::int64_t began;  // ns
  std::int64_t due = 0;      // when the post looks at it, under the lock of the deadlines
  // Set before anybody else sees the call, and anew if calls that were made later are sent before it.
  std::atomic<std::uint64_t> number{0};
  std::uint64_t unique = 0;     // in this post
  std::uint64_t queued_at = 0;  // its place in the peer's outbox, under the peer's lock; 0: was never in it

  bool done() const { return ended_.is_open(); }
  // Until `until` (ns) or a signal.
  bool wait(std::int64_t until) { return ended_.wait(until); }
  // Whether it has ended already; if not, the ticket is due when it does.
  bool announce(std::int64_t ticket);
  // The same, for a ticket that is due only if the call fails, here or there, or its reply has one of
  // `flags`.
  bool announce_failure(std::int64_t ticket, std::uint16_t flags);
  std::pair<CallEnd, std::string> error();
  LetterPtr take_reply();

  // For the post: exactly one `claim` succeeds, and who has it calls `end`.
  bool claim() { return !claimed_.exchange(true, std::memory_order_acq_rel); }
  bool claimed() const { return claimed_.load(std::memory_order_acquire); }
  void end(CallEnd how, std::string text, LetterPtr reply, Tickets& tickets);
  std::atomic<bool> asked{false};  // the callee, when the deadline had passed
  // The messages that may still read the caller's memory, until it ends.
  void sent(std::vector<std::shared_ptr<Parcel>> apart);
  std::vector<std::shared_ptr<Parcel>> take_sent();

 private:
  Latch ended_;
  std::atomic<bool> claimed_{false};
  std::mutex mutex_;
  CallEnd how_ = CallEnd::kNone;
  std::string text_;
  LetterPtr reply_;
  std::int64_t ticket_ = -1, failure_ticket_ = -1;
  std::uint16_t flags_ = 0;
  std::vector<std::shared_ptr<Parcel>> apart_;
};
using CallPtr = std::shared_ptr<Call>;

}  // namespace shoal
