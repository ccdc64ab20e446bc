// A frame travels on a link: a fixed header, then a payload.
//
// A message is one kMessage frame with at most kEager bytes of it; if it is longer, the receiver answers with
// kGrant once it has a buffer, and the rest follows in kMore frames of bounded size, so that groups which
// share a link take turns and a message nobody reads blocks no other.
//
// A peer's unread bytes are bounded: each kMessage is charged to a window of its link, and the receiver
// gives the bytes back (kCredit) once it has them in their place, or has dropped them.  A message for which
// the window has no room is sent as a header alone (kWithheld), and all of it waits for a grant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace shoal {

constexpr std::uint32_t kFrameMagic = 0x4c4f4853;  // "SHOL"
constexpr std::size_t kEager = 256 * 1024;
constexpr std::size_t kBuffered = 64 * 1024;  // up to here a message never waits for its receiver
constexpr std::size_t kMoreLimit = 256 * 1024;
constexpr std::size_t kTextLimit = 64 * 1024;                // payload of a control frame
constexpr std::size_t kAgreeLimit = (4 << 20) + (64 << 10);  // payload of a kAgree
constexpr std::uint64_t kPointToPoint = 1ULL << 63;
constexpr int kMaxDims = 8;

constexpr std::uint64_t kUnreadLimit = 8 << 20;  // bytes of a link that may be unread at its receiver
constexpr std::uint64_t kHeaderCharge = 256;     // what a message is charged beyond its payload
constexpr std::uint64_t kLongest = 1ULL << 48;   // bytes of a message: no address space holds more

// The code of a kMessage.
constexpr std::uint16_t kWithheld = 1;  // it waits for a grant as a whole
constexpr std::uint16_t kLent = 2;      // its payload lies in memory that the sender shares (LoanFields)

enum class Kind : std::uint8_t {
  kAllReduce = 1,
  kReduce = 2,
  kBroadcast = 3,
  kAllGather = 4,
  kReduceScatter = 5,
  kGather = 6,
  kScatter = 7,
  kAllToAll = 8,
  kBarrier = 9,
  kSend = 10,
  kRecv = 11,
};

// Why a group or an operation ended.
enum class ErrorCode : std::uint16_t {
  kNone = 0,
  kPeerLost = 1,
  kMismatch = 2,
  kTimeout = 3,
  kAborted = 4,
  kClosed = 5,
  kOutOfMemory = 6,
  kForked = 7,
  kWire = 8,  // a peer sent, or wrote into shared memory, what cannot be
  kCancelled = 9,
};

enum class FrameType : std::uint16_t {
  kMessage = 1,
  kMore = 2,
  kGrant = 3,
  kCallQuery = 4,  // "what did you call as operation `channel`?"
  kCallReply = 5,
  kBroken = 6,       // the sender's group ended; payload: why
  kGroupClosed = 7,  // the sender left the group in good order; code: Departure
  kBye = 8,          // the sender closed its connections in good order; code: Departure
  kHeartbeat = 9,
  kCredit = 10,        // `total` bytes of the window are free again
  kGroupClosing = 11,  // the sender submits nothing more to the group; code: Closing
  kWithdrawn = 12,     // `message`, of which the rest was to follow, is taken back as if never sent
  // Between posts (cpp/post) only; `channel` is the number that the caller gave the call.
  kCancelCall = 13,  // nobody wants the reply any more
  kAskCall = 14,     // "what became of the call?"
  kTellCall = 15,    // payload: the answer
  kAgree = 16,       // a message of agreement `channel` of the group (cpp/agreement)
};

// The code of a kGrant.
enum Answer : std::uint16_t {
  kWanted = 0,
  kDeclined = 1,  // the receiver drops the message: the rest need not come
};

// The code of a kGroupClosed and of a kBye: why the sender left.
enum Departure : std::uint16_t {
  kByChoice = 0,      // its program closed the group
  kProgramEnded = 1,  // its program ended without closing the group
};

// The code of a kGroupClosing.
enum Closing : std::uint16_t {
  kLeaves = 0,
  kHasRead = 1,   // the receiver's goodbye and all before it: no message of it will be granted any more
  kFinished = 2,  // all numbered operations that the receiver has submitted: nothing of it is needed any more
};

// The code of a kCallReply, and of a kCallQuery for the asking rank's own call.
enum Knowledge : std::uint16_t { kNotArrived = 0, kKnown = 1, kPassed = 2 };

// An operation's call in short.  Peers compare it before they touch data.
struct Fingerprint {
  std::uint8_t kind = 0;
  std::uint8_t dtype = 0;
  std::uint8_t op = 0;
  std::uint8_t lanes = 0;  // of the group, up to 255: they decide which operation waits for which
  std::int32_t root = -1;
  std::uint64_t count = 0;  // elements, where it must be equal on all ranks
  std::uint64_t sizes = 0;  // hash of the list of sizes, where it must be equal
  // A hash of all numbered calls before this one: a rank that had no reason to compare an earlier call (the
  // root of a broadcast) finds out at the next.
  std::uint64_t history = 0;

  bool operator==(const Fingerprint& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
  bool same_call(const Fingerprint& other) const {
    return std::memcmp(this, &other, offsetof(Fingerprint, history)) == 0;
  }
};
static_assert(sizeof(Fingerprint) == 32);

// Point-to-point messages carry dtype and shape, so that a receiver needs no buffer.
struct Shape {
  std::uint8_t dtype = 0;
  std::uint8_t dims = 0;
  std::uint8_t unused[6] = {};
  std::uint64_t sizes[kMaxDims] = {};
};

// The purpose of a kMessage between posts.  A letter's payload is a table of its parts, its head, and the
// parts that are not sent apart; a kPart is one part that is, and follows its letter.
enum class Verb : std::uint8_t { kCall = 1, kPost = 2, kReply = 3, kFailure = 4, kPart = 5 };

struct LetterFields {
  Verb verb{};
  std::uint8_t reserved = 0;
  std::uint16_t flags = 0;
  std::uint16_t parts = 0;
  std::uint16_t apart = 0;  // of the parts, those that follow as messages of their own
  std::uint32_t mailbox = 0;
  std::uint32_t deadline_ms = 0;  // from now on; 0: none
  std::uint32_t head = 0;         // bytes
  std::uint32_t unused = 0;
};
static_assert(sizeof(LetterFields) == 24);

// A kPart that is kLent: where in its sender's memory it lies, and which loan it is (post/lending.h).
struct LoanFields {
  Verb verb{};
  std::uint8_t reserved[7] = {};
  std::uint64_t place = 0;
  std::uint64_t number = 0;
};
static_assert(sizeof(LoanFields) == sizeof(LetterFields));

struct FrameHeader {
  std::uint32_t magic = kFrameMagic;
  FrameType type{};
  std::uint16_t code = 0;     // kBroken: the error code; calls: Knowledge; kMessage: kWithheld, kLent or 0
  std::uint32_t payload = 0;  // bytes that follow
  std::uint32_t source = 0;   // rank in the group
  std::uint64_t group = 0;
  std::uint64_t channel = 0;  // operation number or key, or kPointToPoint | tag
  std::uint64_t message = 0;  // the sender's name for it, for grants; kGroupClosing: the history of its calls
  std::uint64_t total = 0;    // bytes of the whole message
  std::uint32_t step = 0;     // which message of the operation
  std::uint32_t unused = 0;
  union {
    Fingerprint call;
    Shape shape;
    LetterFields letter;
    LoanFields loan;
  };
  FrameHeader() : shape() {}
};
static_assert(sizeof(FrameHeader) == 128);

}  // namespace shoal
