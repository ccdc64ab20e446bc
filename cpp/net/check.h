// Validation of received frames.  No frame, and no field of one, is used before it has passed these checks.
//
// A frame is checked in two steps, because its group may not exist here yet: as a frame of its link when its
// header has arrived, and as a frame of its group immediately or when the group is created.
#pragma once

#include <cstdint>
#include <vector>

#include "net/frame.h"

namespace shoal {

// The state of the packets on a link between RPC endpoints.
struct PacketState {
  std::uint64_t made = 0;       // number of this process's last call
  std::uint64_t last = 0;       // number of the peer's last call
  std::uint32_t parts_due = 0;  // number of parts of the last packet that have yet to arrive separately
  std::uint32_t next_part = 0;
  std::uint64_t call = 0;  // the `channel` of the last packet
};

// The state of the link on which a frame arrives.
struct LinkState {
  std::uint64_t next_message = 1;  // number of the next kMessage
  std::uint64_t unread = 0;        // bytes of this process's window that the peer has used
  std::uint64_t sent = 0;          // number of kMessage frames sent
  std::uint64_t lent = 0;          // bytes of the peer's window that this process has used
  // For kMore: the message that it continues (null if none was granted), and its bytes received so far.
  const FrameHeader* continues = nullptr;
  std::uint64_t arrived = 0;
  const PacketState* packets = nullptr;  // null: the link carries no packets
};

// Returns a description of the flaw of a frame, for the error that ends the connection; null if it is valid.
const char* invalid_reason(const FrameHeader& header, const LinkState& link);

// Checks that depend on the group; `ranks` are its members' global ranks, in order.
const char* flaw_in_group(const FrameHeader& header, int peer, const std::vector<int>& ranks);

// Checks the shape of a point-to-point message of `total` bytes.
const char* flaw_of_shape(const Shape& shape, std::uint64_t total);

// Additional checks for the message of a packet, or of one separate part of it.
const char* flaw_of_packet(const FrameHeader& header, const PacketState& state);

// Checks the table of a packet's parts, when all parts have arrived: the packet's header, its payload, and
// the sizes of the separate parts in order.
const char* flaw_of_parts(const FrameHeader& header, const std::byte* payload,
                          const std::vector<std::uint64_t>& apart);

// Length of the longest prefix of at most `limit` bytes that ends with a complete character (UTF-8).
std::size_t clipped(const char* text, std::size_t bytes, std::size_t limit);

}  // namespace shoal
