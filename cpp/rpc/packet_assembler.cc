#include "rpc/packet_assembler.h"

#include <algorithm>
#include <new>
#include <utility>

#include "common/clock.h"
#include "rpc/endpoint.h"

namespace shoal {
namespace {

std::shared_ptr<std::byte> small_buffer(std::uint64_t bytes) {
  auto* memory = new (std::nothrow) std::byte[bytes > 0 ? bytes : 1];
  return memory == nullptr ? nullptr : std::shared_ptr<std::byte>(memory, [](std::byte* p) { delete[] p; });
}

}  // namespace

const PacketState& PacketAssembler::state() {
  state_.made = peer_.made();
  return state_;
}

// Begins a packet with this header.
std::shared_ptr<PacketAssembler::PartialPacket> PacketAssembler::begin(const FrameHeader& header) {
  const PacketFields& fields = header.packet;
  auto whole = std::make_shared<PartialPacket>();
  whole->packet = std::make_shared<Packet>();
  Packet& packet = *whole->packet;
  packet.peer = peer_.id;
  packet.call = header.channel;
  packet.header = header;
  whole->missing = 1u + fields.apart;
  whole->apart.resize(fields.apart);
  state_.parts_due = fields.apart;
  state_.next_part = 0;
  state_.call = header.channel;
  switch (fields.verb) {
    case Verb::kCall: {
      state_.last = header.channel;
      const std::int64_t deadline =
          fields.deadline_ms == 0 ? 0 : now_ns() + std::int64_t{fields.deadline_ms} * kMillisecond;
      packet.handling = std::make_shared<ReceivedCall>(deadline);
      peer_.handling(header.channel, packet.handling, whole->packet);
      if (partial(header) || fields.apart > 0) calls_[header.channel] = whole;
      break;
    }
    case Verb::kReply:
    case Verb::kFailure:
      whole->dropped = peer_.pending(header.channel) == nullptr;
      break;
    default:
      break;
  }
  if (fields.mailbox != 0) ordered_[fields.mailbox].push_back(whole);
  return whole;
}

// Allocates memory for a message, or refuses the packet if there is none.  False: the budget has no room now.
bool PacketAssembler::make_room(IncomingPart& piece) {
  PartialPacket& whole = *piece.whole;
  const std::uint64_t bytes = piece.header.total;
  if (bytes > kEager) {
    auto grant = endpoint_.budget().take(bytes, grants_, whole.packet->grants.size());
    if (!grant) return false;
    whole.packet->grants.push_back(std::move(grant));
  }
  piece.memory = bytes > kEager ? endpoint_.buffers().take(bytes) : small_buffer(bytes);
  piece.data = piece.memory.get();
  if (piece.data == nullptr) refuse(whole, bytes);
  return true;
}

Destination PacketAssembler::on_header(const FrameHeader& header) {
  if (header.type == FrameType::kMore) {
    auto incoming = peer_.link.routed(header.message);
    return incoming ? Destination{incoming->data + incoming->received, incoming} : Destination{};
  }
  auto piece = std::make_shared<IncomingPart>();
  piece->header = header;
  piece->charge = peer_.link.take_charge();
  if (header.packet.verb == Verb::kPart) {
    piece->index = state_.next_part++;
    --state_.parts_due;
  } else {
    piece->index = kPacketItself;
    current_ = begin(header);
  }
  piece->whole = current_;
  if (header.code == kSharedBuffer) {  // taken even if the packet is dropped, so that the block is returned
    const char* flaw = "lent memory, and shares none";
    if (peer_.borrowed) {
      auto taken = peer_.borrowed->take(header.loan.place, header.loan.number, header.total, flaw);
      piece->memory = std::move(taken.data);
      piece->wanted_back = taken.wanted_back;
    }
    if (!piece->memory) peer_.link.refuse(flaw);
    return {nullptr, piece};
  }
  if (current_->dropped) return {nullptr, piece};
  // Parts are granted in order of arrival.
  const bool queue = header.total > kEager && !waiting_.empty();
  if (queue || !make_room(*piece)) {
    piece->early.reset(new (std::nothrow) std::byte[header.payload > 0 ? header.payload : 1]);
    if (piece->early) return {piece->early.get(), piece};
    refuse(*current_, header.payload);
  }
  return {current_->dropped ? nullptr : piece->data, piece};
}

void PacketAssembler::ask(const std::shared_ptr<IncomingPart>& piece) {
  piece->received = piece->header.payload;
  peer_.link.ask_for_rest(piece->header, piece);
}

void PacketAssembler::on_frame(const FrameHeader& header, const Destination& destination) {
  if (!destination.incoming) return;
  auto piece = std::static_pointer_cast<IncomingPart>(destination.incoming);
  if (header.type == FrameType::kMore) {
    piece->received += header.payload;
    if (piece->received == header.total) finish(*piece);
    return;
  }
  if (piece->whole->dropped) {
    if (partial(header)) peer_.link.decline(header);
    return;
  }
  if (!partial(header)) return finish(*piece);
  if (piece->memory) return ask(piece);
  waiting_.push_back(piece);
  grant_waiting();  // the budget may have signalled room while the frame was arriving
}

void PacketAssembler::grant_waiting() {
  while (!waiting_.empty()) {
    auto piece = waiting_.front();
    if (!piece->whole->dropped) {
      if (!make_room(*piece)) return;
      if (!piece->whole->dropped) {
        std::copy_n(piece->early.get(), piece->header.payload, piece->data);
        piece->early.reset();
        ask(piece);
      }
    }
    if (piece->whole->dropped) peer_.link.decline(piece->header);
    waiting_.pop_front();
  }
}

// A message is complete.
void PacketAssembler::finish(IncomingPart& piece) {
  PartialPacket& whole = *piece.whole;
  if (whole.dropped) return;
  const Verb verb = whole.packet->verb();
  // Bytes counted by the budget need no window, and a reply is bounded by its call.
  if (piece.header.total > kEager || verb == Verb::kReply || verb == Verb::kFailure)
    piece.charge = Charge();
  else
    whole.packet->charges.push_back(std::move(piece.charge));
  if (piece.index == kPacketItself)
    whole.packet->body = piece.memory;
  else
    whole.apart[piece.index] = {piece.memory, piece.header.total, piece.wanted_back};
  if (--whole.missing == 0) complete(whole);
}

void PacketAssembler::complete(PartialPacket& whole) {
  Packet& packet = *whole.packet;
  if (const char* flaw = unfold(packet, whole.apart)) return peer_.link.refuse(flaw);
  whole.complete = true;
  whole.apart.clear();  // `current_` may refer to this packet for long
  packet.owner = peer_.shared_from_this();
  calls_.erase(packet.call);
  if (packet.verb() == Verb::kReply || packet.verb() == Verb::kFailure) {
    packet.taken();
    const PacketPtr reply = std::move(whole.packet);  // dropped if the call has ended meanwhile
    if (CallPtr call = peer_.pending(reply->call); call && call->claim())
      endpoint_.ended(peer_, call, CallEnd::kNone, "", reply);
    return;
  }
  if (packet.handling) packet.handling->advance(ReceivedCall::kArriving, ReceivedCall::kQueued);
  const std::uint32_t mailbox = packet.header.packet.mailbox;
  if (mailbox == 0)
    endpoint_.packet_arrived(std::move(whole.packet));
  else
    advance_mailbox(mailbox);
}

void PacketAssembler::advance_mailbox(std::uint32_t mailbox) {
  auto found = ordered_.find(mailbox);
  if (found == ordered_.end()) return;
  auto& packets = found->second;
  while (!packets.empty() && (packets.front()->complete || packets.front()->dropped)) {
    auto first = std::move(packets.front());
    packets.pop_front();
    if (!first->dropped) endpoint_.packet_arrived(std::move(first->packet));
  }
  if (packets.empty()) ordered_.erase(found);
}

// Drops an incomplete packet; pieces that still arrive are discarded.
void PacketAssembler::abandon(PartialPacket& whole) {
  if (whole.dropped || whole.complete) return;
  whole.dropped = true;
  whole.apart.clear();
  Packet& packet = *whole.packet;
  packet.grants.clear();
  if (packet.verb() == Verb::kCall) {
    peer_.answered(packet.call);
    calls_.erase(packet.call);
  }
  advance_mailbox(packet.header.packet.mailbox);
}

void PacketAssembler::refuse(PartialPacket& whole, std::uint64_t bytes) {
  const std::string text = "no memory for " + std::to_string(bytes) + " bytes";
  const std::uint64_t number = whole.packet->call;
  if (whole.packet->verb() == Verb::kCall) {
    peer_.control(FrameType::kTellCall, number, 1, "the callee has " + text);
  } else if (CallPtr call = peer_.pending(number); call && call->claim()) {
    endpoint_.ended(peer_, call, CallEnd::kRefused, "there is " + text + " of its reply", nullptr);
  }
  abandon(whole);
}

void PacketAssembler::on_withdrawn(const FrameHeader& header) {
  std::shared_ptr<PartialPacket> whole;
  if (auto incoming = peer_.link.unroute(header.message)) {
    whole = std::static_pointer_cast<IncomingPart>(incoming)->whole;
  } else {
    auto found = std::find_if(waiting_.begin(), waiting_.end(),
                              [&](const auto& piece) { return piece->header.message == header.message; });
    if (found == waiting_.end()) return;
    whole = (*found)->whole;
    waiting_.erase(found);
  }
  abandon(*whole);
}

void PacketAssembler::drop(std::uint64_t call) {
  auto found = calls_.find(call);
  if (found == calls_.end()) return;
  if (auto whole = found->second.lock()) abandon(*whole);
}

void PacketAssembler::clear() {
  current_.reset();
  waiting_.clear();
  ordered_.clear();
  calls_.clear();
}

}  // namespace shoal
