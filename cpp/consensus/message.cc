// Encoding: a header of 24 bytes, two sets of ranks as bits, the vote (op, length, bytes), and the decision
// (op, length, ranks as bits, bytes).

#include "consensus/message.h"

#include <cstring>

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

void put(std::string& to, const void* from, std::size_t bytes) {
  to.append(static_cast<const char*>(from), bytes);
}

void put(std::string& to, const RankSet& set, int size) {
  std::string bits(bytes_of_set(size), '\0');
  if (set.size() == size)
    for (int rank : set.list())
      bits[static_cast<std::size_t>(rank) / 8] |= static_cast<char>(1 << (rank % 8));
  to += bits;
}

void put(std::string& to, Op op, const std::string& value) {
  const Value head{op, {}, static_cast<std::uint32_t>(value.size())};
  put(to, &head, sizeof head);
}

class Reader {
 public:
  explicit Reader(std::string_view bytes) : left_(bytes) {}

  bool get(void* to, std::size_t bytes) {
    if (left_.size() < bytes) return false;
    std::memcpy(to, left_.data(), bytes);
    left_.remove_prefix(bytes);
    return true;
  }
  bool get(std::string& to, std::size_t bytes) {
    if (left_.size() < bytes) return false;
    to.assign(left_.substr(0, bytes));
    left_.remove_prefix(bytes);
    return true;
  }
  bool get(RankSet& to, int size) {
    std::string bits;
    if (!get(bits, bytes_of_set(size))) return false;
    to = RankSet(size);
    for (int bit = 0; bit < static_cast<int>(bits.size()) * 8; ++bit) {
      if (((bits[static_cast<std::size_t>(bit) / 8] >> (bit % 8)) & 1) == 0) continue;
      if (bit >= size) return false;
      to.add(bit);
    }
    return true;
  }
  bool ended() const { return left_.empty(); }

 private:
  std::string_view left_;
};

bool zero(const std::uint8_t* bytes, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    if (bytes[i] != 0) return false;
  return true;
}

const char* read(Reader& reader, int size, Message& message) {
  constexpr const char* kShort = "a message of an agreement ends early, or names ranks that do not exist";
  Header header;
  if (!reader.get(&header, sizeof header)) return kShort;
  if (header.flags > (kHasVote | kHasDecision) || !zero(header.reserved, sizeof header.reserved))
    return "a message of an agreement has unknown flags";
  message = Message();
  message.type = header.type;
  message.ballot = header.ballot;
  message.accepted = header.accepted;
  if (!reader.get(message.lost, size) || !reader.get(message.dead, size)) return kShort;
  Value value;
  if (header.flags & kHasVote) {
    Vote vote;
    if (!reader.get(&value, sizeof value) || !zero(value.reserved, sizeof value.reserved)) return kShort;
    vote.op = value.op;
    if (!reader.get(vote.value, value.bytes)) return kShort;
    message.vote = std::move(vote);
  }
  if (header.flags & kHasDecision) {
    Decision decision;
    if (!reader.get(&value, sizeof value) || !zero(value.reserved, sizeof value.reserved)) return kShort;
    decision.op = value.op;
    if (!reader.get(decision.ranks, size) || !reader.get(decision.value, value.bytes)) return kShort;
    message.decision = std::move(decision);
  }
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
  put(result, &header, sizeof header);
  put(result, message.lost, size);
  put(result, message.dead, size);
  if (message.vote) {
    put(result, message.vote->op, message.vote->value);
    result += message.vote->value;
  }
  if (message.decision) {
    put(result, message.decision->op, message.decision->value);
    put(result, message.decision->ranks, size);
    result += message.decision->value;
  }
  return result;
}

const char* decode(std::string_view bytes, const Receiver& receiver, Message& message) {
  if (bytes.size() > message_limit(receiver.size)) return "a message of an agreement is too long";
  Reader reader(bytes);
  if (const char* flaw = read(reader, receiver.size, message)) return flaw;
  if (const char* flaw = flaw_of_fields(message, receiver)) return flaw;
  const RankSet lost = message.lost | message.dead;
  if (lost.has(receiver.sender) || lost.has(receiver.rank))
    return "a message of an agreement counts its sender or its receiver as lost";
  if (message.vote)
    if (const char* flaw = invalid_reason(*message.vote, receiver.size)) return flaw;
  return message.decision ? invalid_reason(*message.decision, receiver.size) : nullptr;
}

}  // namespace shoal::consensus
