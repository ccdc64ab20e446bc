// Messages between members of an agreement, and their encoding.  Only messages accepted by `decode` are used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "consensus/decision.h"
#include "consensus/rank_set.h"

namespace shoal::consensus {

enum class MessageType : std::uint8_t {
  kVote = 1,     // to the leader: the vote, if any; the sender's losses and promise
  kPrepare = 2,  // from a leader: asks for the promise to accept no lower ballot
  kState = 3,    // the promise: the vote, the sender's losses, and its accepted decision
  kPropose = 4,  // from a leader: asks to accept the decision
  kAccept = 5,
  kDecide = 6,
};

// Ballots of rank r in a group of n are r, r + n, r + 2 n, ...
constexpr std::uint64_t kBallotLimit = std::uint64_t{1} << 48;

struct Message {
  MessageType type{};
  std::uint64_t ballot = 0;  // kVote: the highest that the sender has promised; kDecide: 0
  RankSet lost;              // kVote, kState: the sender's losses
  RankSet dead;              // all that the sender knows to be dead
  std::optional<Vote> vote;
  std::uint64_t accepted = 0;        // kState: the ballot of the accepted decision
  std::optional<Decision> decision;  // kState: if one was accepted; kPropose, kDecide
  bool operator==(const Message&) const = default;
};

// The receiver of a message, and its sender.
struct Receiver {
  int size = 0;  // of the group
  int rank = 0;
  int sender = 0;
};

// Maximum bytes of a message in a group of `size`.
std::size_t message_limit(int size);

std::string encode(const Message& message, int size);

// Fills `message` and returns null, or returns a description of the flaw of the bytes.
const char* decode(std::string_view bytes, const Receiver& receiver, Message& message);

}  // namespace shoal::consensus
