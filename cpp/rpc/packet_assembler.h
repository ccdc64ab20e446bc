// Assembles the packets of one peer, in the endpoint's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "net/check.h"
#include "rpc/packet.h"

namespace shoal {

class Peer;
class RpcEndpoint;

class PacketAssembler {
 public:
  PacketAssembler(Peer& peer, RpcEndpoint& endpoint) : peer_(peer), endpoint_(endpoint) {}

  // The state against which the next message is checked.
  const PacketState& state();
  Destination on_header(const FrameHeader& header);
  void on_frame(const FrameHeader& header, const Destination& destination);
  void on_withdrawn(const FrameHeader& header);
  // Asks for the rest of parts for which the budget now has room.
  void grant_waiting();
  // The caller no longer wants the packet, which may still be arriving.
  void drop(std::uint64_t call);
  // Drops everything: no more messages will arrive.
  void clear();

 private:
  // An incomplete packet.
  struct PartialPacket {
    PacketPtr packet;
    std::vector<Part> apart;
    std::size_t missing = 0;
    bool dropped = false;
    bool complete = false;
  };
  // One message of a packet: the packet itself, or a part.
  struct IncomingPart : Incoming {
    std::shared_ptr<PartialPacket> whole;
    std::size_t index = 0;  // of the part, or kPacketItself
    std::shared_ptr<std::byte> memory;
    bool wanted_back = false;            // by the peer that lends the memory
    std::unique_ptr<std::byte[]> early;  // its first bytes, until the budget has room for it
    Charge charge;
  };
  static constexpr std::size_t kPacketItself = ~std::size_t{0};

  std::shared_ptr<PartialPacket> begin(const FrameHeader& header);
  bool make_room(IncomingPart& piece);
  void ask(const std::shared_ptr<IncomingPart>& piece);
  void finish(IncomingPart& piece);
  void complete(PartialPacket& whole);
  void advance_mailbox(std::uint32_t mailbox);
  void abandon(PartialPacket& whole);
  void refuse(PartialPacket& whole, std::uint64_t bytes);

  Peer& peer_;
  RpcEndpoint& endpoint_;
  PacketState state_;
  std::shared_ptr<PartialPacket> current_;  // the last packet; its parts follow
  std::deque<std::shared_ptr<IncomingPart>> waiting_;
  // Packets to ordered mailboxes, from the first incomplete one on.
  std::unordered_map<std::uint32_t, std::deque<std::shared_ptr<PartialPacket>>> ordered_;
  std::unordered_map<std::uint64_t, std::weak_ptr<PartialPacket>> calls_;
  std::shared_ptr<int> grants_ = std::make_shared<int>(0);
};

}  // namespace shoal
