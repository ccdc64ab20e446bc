#include "net/check.h"

#include <algorithm>
#include <limits>

#include "kernels/types.h"

namespace shoal {
namespace {

constexpr auto kLastCollective = static_cast<std::uint8_t>(Kind::kBarrier);
constexpr auto kLastError = static_cast<std::uint16_t>(ErrorCode::kWire);
constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();

// The kind of links on which frames of a type are allowed.
enum class Between { kAll, kRanks, kEndpoints };

// The limits of the fields of one type of frame; other fields must be zero.
struct Limits {
  std::uint16_t codes[2];  // minimum and maximum
  std::uint32_t payload;   // maximum number of bytes
  bool member;             // the frame belongs to a group: `source` and `group` are set
  bool channel;
  bool message;
  std::uint64_t total;  // maximum
  bool step;
  Between between = Between::kRanks;
};

const Limits* limits_of(FrameType type) {
  //                       codes      payload      member channel message total     step
  static constexpr Limits kTable[] = {
      {{0, kSharedBuffer}, kEager, true, true, true, kLongest, true, Between::kAll},
      {{0, 0}, kMoreLimit, true, true, true, kLongest, true, Between::kAll},
      {{kWanted, kDeclined}, 0, false, false, true, 0, false, Between::kAll},         // grant
      {{kNotArrived, kKnown}, 0, true, true, false, 0, false},                        // query
      {{kNotArrived, kPassed}, 0, true, true, false, 0, false},                       // reply
      {{1, kLastError}, kTextLimit, true, false, false, 0, false},                    // broken
      {{kByChoice, kProgramEnded}, 0, true, true, false, 0, false},                   // closed
      {{kByChoice, kProgramEnded}, 0, false, false, false, 0, false, Between::kAll},  // bye
      {{0, 0}, kReportBytes, false, false, false, 0, false, Between::kAll},           // beat
      {{0, 0}, 0, false, false, false, kUnreadLimit, false, Between::kAll},           // credit
      {{kLeaves, kFinished}, 0, true, true, true, 0, false},                          // closing
      {{0, 0}, 0, true, true, true, 0, false, Between::kAll},                         // withdrawn
      {{0, 0}, 0, false, true, false, 0, false, Between::kEndpoints},                 // cancel
      {{0, 0}, 0, false, true, false, 0, false, Between::kEndpoints},                 // ask
      {{0, 1}, kTextLimit, false, true, false, 0, false, Between::kEndpoints},        // tell
      {{0, 0}, kAgreeLimit, true, true, false, 0, false},                             // agree
  };
  const auto index = static_cast<std::size_t>(type) - 1;
  return index < std::size(kTable) ? &kTable[index] : nullptr;
}

// Whether the union of call and shape is zero from byte `from` on.
bool empty(const FrameHeader& header, std::size_t from) {
  auto bytes = reinterpret_cast<const unsigned char*>(&header.shape);
  return std::all_of(bytes + from, bytes + sizeof(Shape), [](unsigned char byte) { return byte == 0; });
}

const char* flaw_of_call(const FrameHeader& header) {
  const Fingerprint& call = header.call;
  const int kind = call.kind & ~Fingerprint::kOnDevice;
  if (kind < 1 || kind > kLastCollective) return "an operation that does not exist";
  if (itemsize(static_cast<DType>(call.dtype)) == 0) return "a dtype that does not exist";
  if (call.op >= kRedOpCount) return "a reduction that does not exist";
  if ((call.lanes & Fingerprint::kMaxLanes) == 0 ||
      call.lanes >> Fingerprint::kAlgorithmShift >= Fingerprint::kAlgorithms || call.root < -1)
    return "a call that cannot be";
  return empty(header, sizeof(Fingerprint)) ? nullptr : "bytes in what is reserved";
}

const char* flaw_of_message(const FrameHeader& header, const LinkState& link) {
  const bool nothing = header.code == kDeferred || header.code == kSharedBuffer;
  const std::uint64_t due = nothing ? 0 : std::min<std::uint64_t>(header.total, kEager);
  if (header.payload != due) return "a message that is not cut as messages are";
  if (header.message != link.next_message) return "a message out of turn";
  if (!nothing && link.unread + header.payload + kHeaderCharge > kUnreadLimit)
    return "more than its window has room for";
  if (link.packets != nullptr) return flaw_of_packet(header, *link.packets);
  if (header.code == kSharedBuffer) return "a message in memory that it has not lent";
  if ((header.channel & kPointToPoint) == 0) return flaw_of_call(header);
  if (header.step != 0) return "a step of a message that has none";
  if (header.late != 0) return "bytes in what is reserved";
  return flaw_of_shape(header.shape, header.total);
}

const char* flaw_of_more(const FrameHeader& header, const LinkState& link) {
  if (link.continues == nullptr) return "the rest of a message that was not asked for";
  FrameHeader expected = *link.continues;
  expected.type = header.type;
  expected.code = 0;
  expected.payload =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(expected.total - link.arrived, kMoreLimit));
  return std::memcmp(&expected, &header, sizeof header) == 0 ? nullptr
                                                             : "something else than the rest of its message";
}

// Unpacks a shape of more than kMaxDims dimensions (see backend/native/channel.py): the number of dimensions,
// each length in groups of seven bits, zeros, and a last byte of 0x80, which no ordinary length has.
bool unpack(const Shape& shape, std::vector<std::uint64_t>& sizes) {
  constexpr std::size_t kBytes = sizeof shape.sizes;
  auto bytes = reinterpret_cast<const unsigned char*>(shape.sizes);
  if (bytes[kBytes - 1] != 0x80 || bytes[0] <= kMaxDims) return false;
  std::size_t at = 1;
  for (int dim = 0; dim < bytes[0]; ++dim) {
    std::uint64_t size = 0;
    for (int shift = 0;; shift += 7) {
      if (at == kBytes - 1 || shift > 56) return false;
      const unsigned char byte = bytes[at++];
      size |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if ((byte & 0x80) == 0) break;
    }
    sizes.push_back(size);
  }
  return std::all_of(bytes + at, bytes + kBytes - 1, [](unsigned char byte) { return byte == 0; });
}

}  // namespace

const char* flaw_of_shape(const Shape& shape, std::uint64_t total) {
  const std::size_t item = itemsize(static_cast<DType>(shape.dtype));
  if (item == 0) return "a dtype that does not exist";
  if (shape.dims > kMaxDims) return "more dimensions than a header holds";
  if (std::any_of(shape.unused, std::end(shape.unused), [](auto byte) { return byte != 0; }) ||
      std::any_of(shape.sizes + shape.dims, std::end(shape.sizes), [](auto size) { return size != 0; }))
    return "bytes in what is reserved";
  std::vector<std::uint64_t> packed;
  const std::uint64_t* first = shape.sizes;
  const std::uint64_t* last = first + shape.dims;
  if (shape.dims == kMaxDims && shape.sizes[kMaxDims - 1] >> 63) {
    if (!unpack(shape, packed)) return "a shape that is not one";
    first = packed.data();
    last = first + packed.size();
  }
  // The strides must be representable, also for an empty tensor.
  std::uint64_t count = item, strides = 1;
  for (; first != last; ++first) {
    if (__builtin_mul_overflow(strides, std::max<std::uint64_t>(*first, 1), &strides) || strides > kMost)
      return "a shape that is larger than any tensor";
    if (__builtin_mul_overflow(count, *first, &count)) return "a shape that is larger than any tensor";
  }
  return count == total ? nullptr : "a shape that does not fit the number of bytes";
}

const char* invalid_reason(const FrameHeader& header, const LinkState& link) {
  if (header.magic != kFrameMagic) return "something that is not a frame";
  const Limits* limits = limits_of(header.type);
  if (limits == nullptr) return "a frame of a type that does not exist";
  if (limits->between == (link.packets != nullptr ? Between::kRanks : Between::kEndpoints))
    return "a frame of a type that has no place here";
  if (header.code < limits->codes[0] || header.code > limits->codes[1]) return "a code that does not exist";
  if (header.payload > limits->payload) return "a frame that is too long";
  if (header.total > limits->total) return "a number of bytes that cannot be";
  if ((!limits->member && (header.source != 0 || header.group != 0)) ||
      (!limits->channel && header.channel != 0) || (!limits->message && header.message != 0) ||
      (!limits->step && (header.step != 0 || header.late != 0)))
    return "bytes in what is reserved";
  switch (header.type) {
    case FrameType::kMessage:
      return flaw_of_message(header, link);
    case FrameType::kMore:
      return flaw_of_more(header, link);
    case FrameType::kCallQuery:
    case FrameType::kCallReply:
      if (header.channel & kPointToPoint) return "a question about a message";
      if (header.code == kKnown) return flaw_of_call(header);
      break;
    case FrameType::kHeartbeat:
      if (header.payload != 0 && (header.payload != kReportBytes || link.packets != nullptr))
        return "a report in a heartbeat that has none";
      break;
    case FrameType::kGrant:
      if (header.message == 0 || header.message > link.sent) return "a grant of a message that was not sent";
      break;
    case FrameType::kWithdrawn:
      if (header.message == 0 || header.message >= link.next_message)
        return "the withdrawal of a message that was not sent";
      break;
    case FrameType::kTellCall:
      if (header.channel == 0 || header.channel > link.packets->made)
        return "news of a call that was not made";
      break;
    case FrameType::kCredit:
      if (header.total == 0 || header.total > link.lent) return "credit that it was not given";
      break;
    default:
      break;
  }
  return empty(header, 0) ? nullptr : "bytes in what is reserved";
}

const char* flaw_in_group(const FrameHeader& header, int peer, const std::vector<int>& ranks) {
  if (header.source >= ranks.size() || ranks[header.source] != peer) return "a frame in the name of another";
  const bool question = header.type == FrameType::kCallQuery || header.type == FrameType::kCallReply;
  const bool call = header.type == FrameType::kMessage ? (header.channel & kPointToPoint) == 0
                                                       : question && header.code == kKnown;
  if (call && header.call.root >= static_cast<int>(ranks.size()))
    return "a root that is no rank of the group";
  if (header.late > ranks.size()) return "a late rank that is no rank of the group";
  return nullptr;
}

std::size_t clipped(const char* text, std::size_t bytes, std::size_t limit) {
  if (bytes <= limit) return bytes;
  while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xc0) == 0x80) --limit;
  return limit;
}

}  // namespace shoal
