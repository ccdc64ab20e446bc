// Encoding: a header of 24 bytes, two sets of ranks as bits, the vote (op, length, bytes), and the decision
// (op, length, ranks as bits, bytes).

#include "consensus/message.h"

#include <algorithm>
#include <span>

#include "common/bytes.h"

namespace shoal::consensus {
namespace {

constexpr std::uint8_t kHasVote = 1, kHasDecision = 2;

struct Header {
  MessageType type{};
  std::uint8_t flags = 0;
  std::uint8_t reserved[6] = {};
  std::uint64_t ballot = 0;
  std::uint64_t accepted = 0;
};
static_assert(sizeof(Header) == 24);

struct Value {
  Op op{};
  std::uint8_t reserved[3] = {};
  std::uint32_t bytes = 0;
};
static_assert(sizeof(Value) == 8);

std::size_t bytes_of_set(int size) { return (static_cast<std::size_t>(size) + 7) / 8; }

void put_set(std::string& to, const RankSet& set, int size) {
  std::string bits(bytes_of_set(size), '\0');
  if (set.size() == size)
    for (int rank : set.list()) bits[rank / 8] |= static_cast<char>(1 << (rank % 8));
  to += bits;
}

void put_value(std::string& to, Op op, const std::string& value) {
  put(to, Value{op, {}, static_cast<std::uint32_t>(value.size())});
}

RankSet get_set(ByteReader& reader, int size) {
  RankSet set(size);
  const std::string_view bits = reader.text(bytes_of_set(size));
  for (int bit = 0; bit < static_cast<int>(bits.size()) * 8; ++bit) {
    if (((bits[bit / 8] >> (bit % 8)) & 1) == 0) continue;
    reader.require(bit < size);
    if (bit < size) set.add(bit);
  }
  return set;
}

bool zero(std::span<const std::uint8_t> bytes) {
  return std::ranges::all_of(bytes, [](std::uint8_t byte) { return byte == 0; });
}

Value get_value(ByteReader& reader) {
  const auto value = reader.get<Value>();
  reader.require(zero(value.reserved));
  return value;
}

const char* read(std::string_view bytes, int size, Message& message) {
  ByteReader reader(bytes);
  const auto header = reader.get<Header>();
  if (header.flags > (kHasVote | kHasDecision) || !zero(header.reserved))
    return "a message of an agreement has unknown flags";
  message = Message();
  message.type = header.type;
  message.ballot = header.ballot;
  message.accepted = header.accepted;
  message.lost = get_set(reader, size);
  message.dead = get_set(reader, size);
  if (header.flags & kHasVote) {
    const Value value = get_value(reader);
    message.vote = Vote{value.op, std::string(reader.text(value.bytes))};
  }
  if (header.flags & kHasDecision) {
    const Value value = get_value(reader);
    Decision& decision = message.decision.emplace();
    decision.op = value.op;
    decision.ranks = get_set(reader, size);
    decision.value = reader.text(value.bytes);
  }
  if (!reader.well()) return "a message of an agreement ends early, or names ranks that do not exist";
  return reader.ended() ? nullptr : "a message of an agreement is too long";
}

// Checks the fields that each message type must have, and the owner of its ballot.
const char* flaw_of_fields(const Message& message, const Receiver& receiver) {
  using enum MessageType;
  const MessageType type = message.type;
  if (type < kVote || type > kDecide) return "a message of an agreement has an unknown type";
  const bool tells_losses = type == kVote || type == kState;
  if (!tells_losses && message.lost.any()) return "a message of an agreement has losses out of place";
  if (message.vote && type != kVote && type != kState) return "a message of an agreement has a vote too many";
  const bool must_decide = type == kPropose || type == kDecide;
  if (must_decide ? !message.decision : message.decision && type != kState)
    return "a message of an agreement has a decision too few or too many";
  if (message.accepted > message.ballot || (message.accepted != 0 && (type != kState || !message.decision)))
    return "a message of an agreement has accepted a ballot that was not proposed";
  if (message.ballot >= kBallotLimit) return "a ballot is too high";
  const auto owner = static_cast<int>(message.ballot % static_cast<std::uint64_t>(receiver.size));
  const bool wrong = type == kPrepare || type == kPropose ? owner != receiver.sender
                     : type == kState || type == kAccept  ? owner != receiver.rank
                                                          : type == kDecide && message.ballot != 0;
  return wrong ? "a ballot belongs to another rank" : nullptr;
}

}  // namespace

std::size_t message_limit(int size) {
  const std::size_t votes = static_cast<std::size_t>(size) * (4 + vote_limit(size));
  return sizeof(Header) + 3 * bytes_of_set(size) + 2 * sizeof(Value) + vote_limit(size) + votes;
}

std::string encode(const Message& message, int size) {
  Header header;
  header.type = message.type;
  header.flags =
      static_cast<std::uint8_t>((message.vote ? kHasVote : 0) | (message.decision ? kHasDecision : 0));
  header.ballot = message.ballot;
  header.accepted = message.accepted;
  std::string result;
  put(result, header);
  put_set(result, message.lost, size);
  put_set(result, message.dead, size);
  if (message.vote) {
    put_value(result, message.vote->op, message.vote->value);
    result += message.vote->value;
  }
  if (message.decision) {
    put_value(result, message.decision->op, message.decision->value);
    put_set(result, message.decision->ranks, size);
    result += message.decision->value;
  }
  return result;
}

const char* decode(std::string_view bytes, const Receiver& receiver, Message& message) {
  if (bytes.size() > message_limit(receiver.size)) return "a message of an agreement is too long";
  if (const char* flaw = read(bytes, receiver.size, message)) return flaw;
  if (const char* flaw = flaw_of_fields(message, receiver)) return flaw;
  const RankSet lost = message.lost | message.dead;
  if (lost.has(receiver.sender) || lost.has(receiver.rank))
    return "a message of an agreement counts its sender or its receiver as lost";
  if (message.vote)
    if (const char* flaw = invalid_reason(*message.vote, receiver.size)) return flaw;
  return message.decision ? invalid_reason(*message.decision, receiver.size) : nullptr;
}

}  // namespace shoal::consensus
