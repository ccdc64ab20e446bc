// The frames on a link: a fixed header, then a payload.
//
// A message is one kMessage frame with at most kEager bytes.  If the message is longer, the receiver replies
// with kGrant when it has a buffer, and the rest follows in kMore frames of bounded size.  So groups that
// share a link take turns, and an unread message does not block others.
//
// A peer's unread bytes are bounded: each kMessage is charged to a window of its link, and the receiver
// returns the bytes (kCredit) when it has delivered or dropped them.  If the window has no room for a
// message, only its header is sent (kDeferred), and the whole message waits for a grant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace shoal {

constexpr std::uint32_t kFrameMagic = 0x4c4f4853;  // "SHOL"
constexpr std::size_t kEager = 256 * 1024;
constexpr std::size_t kBuffered = 64 * 1024;  // messages up to this size never wait for their receiver
constexpr std::size_t kMoreLimit = 256 * 1024;
constexpr std::size_t kTextLimit = 64 * 1024;                // payload of a control frame
constexpr std::size_t kAgreeLimit = (4 << 20) + (64 << 10);  // payload of a kAgree
constexpr std::size_t kReportBytes = 64;                     // payload of a kHeartbeat between ranks
constexpr std::uint64_t kPointToPoint = 1ULL << 63;
constexpr int kMaxDims = 8;

constexpr std::uint64_t kUnreadLimit = 8 << 20;  // maximum bytes of a link that the receiver has not read
constexpr std::uint64_t kHeaderCharge = 256;     // charge of a message in addition to its payload
constexpr std::uint64_t kLongest = 1ULL << 48;   // maximum bytes of a message: no address space holds more

// The code of a kMessage.
constexpr std::uint16_t kDeferred = 1;      // the whole message waits for a grant
constexpr std::uint16_t kSharedBuffer = 2;  // the payload is in memory that the sender shares (LoanFields)

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

inline bool reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
}

// The reason why a group or an operation ended.
enum class ErrorCode : std::uint16_t {
  kNone = 0,
  kPeerLost = 1,
  kMismatch = 2,
  kTimeout = 3,
  kAborted = 4,
  kClosed = 5,
  kOutOfMemory = 6,
  kForked = 7,
  kWire = 8,  // a peer sent invalid data or wrote it into shared memory
  kCancelled = 9,
};

enum class FrameType : std::uint16_t {
  kMessage = 1,
  kMore = 2,
  kGrant = 3,
  kCallQuery = 4,  // asks for the call of operation `channel`
  kCallReply = 5,
  kBroken = 6,         // the sender's group failed; payload: the reason
  kGroupClosed = 7,    // the sender left the group in good order; code: Departure
  kBye = 8,            // the sender closed its connections in good order; code: Departure
  kHeartbeat = 9,      // payload: between ranks, a RemoteStatus (engine/status_page.h)
  kCredit = 10,        // `total` bytes of the window are free again
  kGroupClosing = 11,  // the sender submits no more operations to the group; code: Closing
  kWithdrawn = 12,     // `message`, which was sent in part, is withdrawn as if it had never been sent
  // Between RPC endpoints (cpp/rpc) only; `channel` is the caller's number of the call.
  kCancelCall = 13,  // the reply is no longer needed
  kAskCall = 14,     // asks for the status of the call
  kTellCall = 15,    // payload: the status
  kAgree = 16,       // a message of agreement `channel` of the group (cpp/consensus)
};

// The code of a kGrant.
enum Answer : std::uint16_t {
  kWanted = 0,
  kDeclined = 1,  // the receiver drops the message; the rest must not be sent
};

// The code of a kGroupClosed or kBye: why the sender left.
enum Departure : std::uint16_t {
  kByChoice = 0,      // its program closed the group
  kProgramEnded = 1,  // its program ended without closing the group
};

// The code of a kGroupClosing.
enum Closing : std::uint16_t {
  kLeaves = 0,
  kHasRead = 1,   // has read the receiver's goodbye and everything before it, and grants nothing more
  kFinished = 2,  // has completed all numbered operations of the receiver and needs nothing more
};

// The code of a kCallReply, and of a kCallQuery for the asking rank's own call.
enum Knowledge : std::uint16_t { kNotArrived = 0, kKnown = 1, kPassed = 2 };

// A summary of an operation's call.  Peers compare it before they use any data.
struct Fingerprint {
  std::uint8_t kind = 0;  // and kOnDevice
  std::uint8_t dtype = 0;
  std::uint8_t op = 0;
  // The group's number of lanes, up to kMaxLanes, which determines which operation waits for which; and its
  // Algorithm, in the bits above.
  std::uint8_t lanes = 0;
  std::int32_t root = -1;
  std::uint64_t count = 0;  // elements, if the number must be equal on all ranks
  std::uint64_t sizes = 0;  // hash of the list of sizes, if it must be equal
  // A hash of all earlier numbered calls.  A rank that did not have to compare an earlier call (such as the
  // root of a broadcast) detects a difference at the next call.
  std::uint64_t history = 0;

  static constexpr std::uint8_t kMaxLanes = 0x1F;
  static constexpr int kAlgorithmShift = 5;
  static constexpr int kAlgorithms = 5;

  // In `kind`: the tensors are on a device other than the CPU.
  static constexpr std::uint8_t kOnDevice = 0x80;

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

// The purpose of a kMessage between RPC endpoints.  A packet's payload is a table of its parts, its head, and
// the parts that are not sent separately.  Each separate part follows its packet as a kPart.
enum class Verb : std::uint8_t { kCall = 1, kPost = 2, kReply = 3, kFailure = 4, kPart = 5 };

struct PacketFields {
  Verb verb{};
  std::uint8_t reserved = 0;
  std::uint16_t flags = 0;
  std::uint16_t parts = 0;
  std::uint16_t apart = 0;  // number of parts that follow as separate messages
  std::uint32_t mailbox = 0;
  std::uint32_t deadline_ms = 0;  // relative; 0: none
  std::uint32_t head = 0;         // bytes
  std::uint32_t unused = 0;
};
static_assert(sizeof(PacketFields) == 24);

// A kPart with kSharedBuffer: its address in the sender's memory, and the number of the loan
// (rpc/shared_buffers.h).
struct LoanFields {
  Verb verb{};
  std::uint8_t reserved[7] = {};
  std::uint64_t place = 0;
  std::uint64_t number = 0;
};
static_assert(sizeof(LoanFields) == sizeof(PacketFields));

struct FrameHeader {
  std::uint32_t magic = kFrameMagic;
  FrameType type{};
  std::uint16_t code =
      0;  // kBroken: the error code; calls: Knowledge; kMessage: kDeferred, kSharedBuffer or 0
  std::uint32_t payload = 0;  // bytes that follow
  std::uint32_t source = 0;   // rank in the group
  std::uint64_t group = 0;
  std::uint64_t channel = 0;  // operation number or key, or kPointToPoint | tag
  std::uint64_t message = 0;  // the sender's number for it, for grants; kGroupClosing: hash of its calls
  std::uint64_t total = 0;    // bytes of the whole message
  std::uint32_t step = 0;     // index of the message in the operation
  // Messages of collectives: 1 + the rank (in the group) for which the sender had to wait; 0: none.
  std::uint32_t late = 0;
  union {
    Fingerprint call;
    Shape shape;
    PacketFields packet;
    LoanFields loan;
  };
  FrameHeader() : shape() {}
};
static_assert(sizeof(FrameHeader) == 128);

// Whether the sender has sent only the first frame of the message.
inline bool partial(const FrameHeader& header) {
  return header.code == kDeferred || (header.code != kSharedBuffer && header.payload < header.total);
}

}  // namespace shoal

// A packet's payload: a table with an entry per part, the head, then the inline parts, aligned.
namespace shoal::layout {

struct Entry {
  std::uint64_t bytes = 0;
  std::uint64_t place = 0;  // kInside or kApart
};

constexpr std::uint64_t kInside = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kApart = kInside - 1;
constexpr std::size_t kAlignment = 16;

constexpr std::uint64_t aligned(std::uint64_t at) { return (at + kAlignment - 1) / kAlignment * kAlignment; }

inline std::uint64_t head_at(const PacketFields& packet) { return packet.parts * sizeof(Entry); }

}  // namespace shoal::layout
