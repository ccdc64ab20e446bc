// Checks of packets, the messages between RPC endpoints (cpp/rpc).
#include <algorithm>
#include <cstring>

#include "net/check.h"

namespace shoal {
namespace {

bool all_zero(const std::byte* begin, const std::byte* end) {
  return std::all_of(begin, end, [](std::byte byte) { return byte == std::byte{0}; });
}

}  // namespace

const char* flaw_of_packet(const FrameHeader& header, const PacketState& state) {
  const PacketFields& packet = header.packet;
  auto fields = reinterpret_cast<const std::byte*>(&header.shape);
  if (header.source != 0 || header.group != 0 || header.late != 0 || packet.reserved != 0 ||
      packet.unused != 0 || !all_zero(fields + sizeof(PacketFields), fields + sizeof(Shape)))
    return "bytes in what is reserved";
  if (packet.verb == Verb::kPart) {
    if (state.parts_due == 0) return "a part of no packet";
    if (header.channel != state.call || header.step != state.next_part) return "another part than the next";
    const std::size_t used =
        header.code == kSharedBuffer ? offsetof(LoanFields, place) : sizeof(PacketFields);
    return all_zero(fields + sizeof(Verb), fields + used) ? nullptr : "bytes in what is reserved";
  }
  if (header.code == kSharedBuffer) return "a packet in lent memory, where only parts may be";
  if (state.parts_due != 0) return "a packet before the parts of the last one";
  if (header.step != 0) return "a step of a packet, which has none";
  if (packet.apart > packet.parts) return "a packet with more parts apart than parts";
  if (header.total < layout::head_at(packet) + packet.head) return "a packet that is shorter than its head";
  const bool call = packet.verb == Verb::kCall, post = packet.verb == Verb::kPost;
  if (!call && packet.deadline_ms != 0) return "a deadline of a packet that is not a call";
  if ((call || post) && header.code == kDeferred) return "a packet that had to wait for its window";
  if (post) return header.channel == 0 ? nullptr : "a call number on a packet that is not a call";
  if (call) return header.channel > state.last ? nullptr : "a call that came before";
  if (packet.verb != Verb::kReply && packet.verb != Verb::kFailure) return "a packet of no known kind";
  if (packet.mailbox != 0) return "a mailbox of a reply";
  return header.channel != 0 && header.channel <= state.made ? nullptr
                                                             : "a reply to a call that was not made";
}

const char* flaw_of_parts(const FrameHeader& header, const std::byte* payload,
                          const std::vector<std::uint64_t>& apart) {
  const PacketFields& packet = header.packet;
  std::uint64_t end = layout::head_at(packet) + packet.head;
  std::size_t next = 0;
  for (std::size_t i = 0; i < packet.parts; ++i) {
    layout::Entry entry;
    std::memcpy(&entry, payload + i * sizeof entry, sizeof entry);
    if (entry.place == layout::kApart) {
      if (next == apart.size() || entry.bytes != apart[next++]) return "a part of another size than it has";
    } else if (entry.place == layout::kInside) {
      end = layout::aligned(end);
      if (entry.bytes > header.total || end > header.total - entry.bytes) return "a part beyond its packet";
      end += entry.bytes;
    } else {
      return "a part with an invalid place";
    }
  }
  if (next != apart.size()) return "a part that its packet does not list";
  return end == header.total ? nullptr : "a packet that is longer than its parts";
}

}  // namespace shoal
