// Checks received frames.  Nothing acts on a frame, or on a field of it, that has not passed here.
//
// A frame is checked in two steps, because the group that it belongs to may not exist here yet: as a frame
// of its link when its header has arrived, and as a frame of its group at once or when the group is made.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/frame.h"

namespace shoal {

// The state of the letters on a link between posts.
struct LetterState {
  std::uint64_t made = 0;       // the number of our last call
  std::uint64_t last = 0;       // the number of the peer's last call
  std::uint32_t parts_due = 0;  // of the letter that came last: how many of its parts are yet to come apart
  std::uint32_t next_part = 0;
  std::uint64_t call = 0;  // its `channel`
};

// The state of the link on which a frame arrives.
struct LinkState {
  std::uint64_t next_message = 1;  // the name of the next kMessage
  std::uint64_t unread = 0;        // bytes of our window that the peer has used
  std::uint64_t sent = 0;          // kMessage: how many we have sent
  std::uint64_t lent = 0;          // bytes of the peer's window that we have used
  // kMore: the message that it continues, null if none was granted, and how much of that has come.
  const FrameHeader* continues = nullptr;
  std::uint64_t arrived = 0;
  const LetterState* letters = nullptr;  // null: the link carries no letters
};

// Returns the flaw of a frame, in words for the error that ends the connection; null if it has none.
const char* flaw_of(const FrameHeader& header, const LinkState& link);

// The same for what depends on the group: its members' global ranks, in order.
const char* flaw_in_group(const FrameHeader& header, int peer, const std::vector<int>& ranks);

// The same for the shape of a point-to-point message of `total` bytes.
const char* flaw_of_shape(const Shape& shape, std::uint64_t total);

// The same for the message of a letter, or of one part of it, beyond what all messages keep to.
const char* flaw_of_letter(const FrameHeader& header, const LetterState& state);

// The same for the table of a letter's parts, once all of them are there: the letter's header, its payload,
// and the bytes of the parts that came apart in their order.
const char* flaw_of_parts(const FrameHeader& header, const std::byte* payload,
                          const std::vector<std::uint64_t>& apart);

// The longest part of a text of at most `limit` bytes that ends with a whole character (UTF-8).
std::size_t clipped(const char* text, std::size_t bytes, std::size_t limit);

}  // namespace shoal
