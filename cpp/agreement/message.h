// What members of an agreement send one another, and its bytes.  Nothing acts on a message that `decode` did
// not accept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "agreement/decision.h"
#include "agreement/rank_set.h"

namespace shoal::agreement {

enum class MessageType : std::uint8_t {
  kVote = 1,     // to the leader: the vote, if there is one; whom the sender lost; its promise
  kPrepare = 2,  // of a leader: promise to accept nothing of a lower ballot
  kState = 3,    // the promise: the vote, whom the sender lost, and what it has accepted
  kPropose = 4,  // of a leader: accept this
  kAccept = 5,
  kDecide = 6,
};

// Ballots of rank r in a group of n are r, r + n, r + 2 n, ...
constexpr std::uint64_t kBallotLimit = std::uint64_t{1} << 48;

struct Message {
  MessageType type{};
  std::uint64_t ballot = 0;  // kVote: the highest that the sender has promised; kDecide: 0
  RankSet lost;              // kVote, kState: those that the sender has lost
  RankSet dead;              // those that it knows to be dead, of these and of others
  std::optional<Vote> vote;
  std::uint64_t accepted = 0;        // kState: the ballot of the decision that was accepted
  std::optional<Decision> decision;  // kState: if one was accepted; kPropose, kDecide
  bool operator==(const Message&) const = default;
};

// The end of a link that a message came to.
struct Receiver {
  int size = 0;  // of the group
  int rank = 0;
  int sender = 0;
};

// The most bytes of a message in a group of so many.
std::size_t message_limit(int size);

std::string encode(const Message& message, int size);

// Returns what is wrong with the bytes, in words; null if nothing is, and then the message is filled.
const char* decode(std::string_view bytes, const Receiver& receiver, Message& message);

}  // namespace shoal::agreement
