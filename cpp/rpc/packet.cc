#include "rpc/packet.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "common/clock.h"
#include "net/check.h"

namespace shoal {

OutgoingPacket compose(const PacketContents& contents, SharedBufferPool* lender, int peer) {
  const auto& [fields, head, parts, keep] = contents;
  if (parts.size() > std::numeric_limits<std::uint16_t>::max())
    throw std::invalid_argument("a packet has at most 65,535 parts, got " + std::to_string(parts.size()));
  if (head.size() > std::numeric_limits<std::uint32_t>::max())
    throw std::invalid_argument("the head of a packet has at most 4 GiB");
  OutgoingPacket outgoing;
  auto packet = std::make_shared<OutgoingPart>();
  PacketFields& named = packet->header.packet;
  named = fields;
  named.parts = static_cast<std::uint16_t>(parts.size());
  named.head = static_cast<std::uint32_t>(head.size());
  std::uint64_t total = layout::head_at(named) + head.size();
  for (const PartToSend& part : parts)
    if (part.bytes > kInsideLimit)
      ++named.apart;
    else
      total = layout::aligned(total) + part.bytes;
  packet->own = std::make_unique_for_overwrite<std::byte[]>(total + 1);
  std::byte* const begin = packet->own.get();
  std::uint64_t at = layout::head_at(named);
  std::copy(head.begin(), head.end(), begin + at);
  at += head.size();
  outgoing.messages.push_back(packet);
  outgoing.bytes = total;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    layout::Entry entry{parts[i].bytes, layout::kInside};
    if (parts[i].bytes > kInsideLimit) {
      entry.place = layout::kApart;
      auto apart = std::make_shared<OutgoingPart>();
      apart->header.step = static_cast<std::uint32_t>(outgoing.messages.size() - 1);
      apart->header.packet.verb = Verb::kPart;
      apart->header.total = parts[i].bytes;
      if (lender != nullptr && parts[i].bytes > kEager)  // in a socket it would wait for a grant
        apart->loan = lender->lend(peer, parts[i].data, parts[i].bytes);
      if (apart->loan) {
        apart->header.code = kSharedBuffer;
        apart->header.loan.place = apart->loan->place;
        apart->header.loan.number = apart->loan->number;
      } else {
        apart->data = parts[i].data;
        apart->keep = keep;
      }
      outgoing.messages.push_back(std::move(apart));
    } else {
      std::fill(begin + at, begin + layout::aligned(at), std::byte{0});
      at = layout::aligned(at);
      std::copy_n(parts[i].data, parts[i].bytes, begin + at);
      at += parts[i].bytes;
    }
    std::memcpy(begin + i * sizeof entry, &entry, sizeof entry);
  }
  packet->data = begin;
  packet->header.total = total;
  return outgoing;
}

const char* unfold(Packet& packet, const std::vector<Part>& apart) {
  const PacketFields& fields = packet.header.packet;
  std::vector<std::uint64_t> sizes;
  for (const Part& part : apart) sizes.push_back(part.bytes);
  if (const char* flaw = flaw_of_parts(packet.header, packet.body.get(), sizes)) return flaw;
  std::uint64_t at = layout::head_at(fields) + fields.head;
  std::size_t next = 0;
  packet.parts.reserve(fields.parts);
  for (std::size_t i = 0; i < fields.parts; ++i) {
    layout::Entry entry;
    std::memcpy(&entry, packet.body.get() + i * sizeof entry, sizeof entry);
    if (entry.place == layout::kApart) {
      packet.parts.push_back(apart[next++]);
    } else {
      at = layout::aligned(at);
      packet.parts.push_back({{packet.body, packet.body.get() + at}, entry.bytes});
      at += entry.bytes;
    }
  }
  return nullptr;
}

// -- calls received -------------------------------------------------------------------------------

ReceivedCall::State ReceivedCall::state() {
  std::lock_guard lock(mutex_);
  return state_;
}

bool ReceivedCall::advance(State from, State to) {
  std::lock_guard lock(mutex_);
  if (state_ != from) return false;
  state_ = to;
  if (to == kRunning) began_ = now_ns();
  return true;
}

void ReceivedCall::withdraw_reply(Tickets& tickets) {
  std::lock_guard lock(mutex_);
  if (reply_unwanted_.exchange(true, std::memory_order_acq_rel)) return;
  if (ticket_ >= 0 && state_ != kAnswered) tickets.add(ticket_);
}

bool ReceivedCall::announce(std::int64_t ticket) {
  std::lock_guard lock(mutex_);
  if (is_reply_unwanted()) return true;
  ticket_ = ticket;
  return false;
}

void ReceivedCall::describe(std::string text) {
  text.resize(clipped(text.data(), text.size(), kNoteLimit));
  std::lock_guard lock(mutex_);
  note_ = std::move(text);
}

std::string ReceivedCall::running(std::int64_t now) {
  std::lock_guard lock(mutex_);
  return "running for " + seconds(now - began_) + (note_.empty() ? "" : " in " + note_);
}

ReceivedCall::Status ReceivedCall::status() {
  std::lock_guard lock(mutex_);
  return {state_, began_, note_};
}

// -- calls made -----------------------------------------------------------------------------------

bool Call::announce(std::int64_t ticket) {
  std::lock_guard lock(mutex_);
  if (ended_.is_open()) return true;
  ticket_ = ticket;
  return false;
}

bool Call::announce_failure(std::int64_t ticket, std::uint16_t flags) {
  std::lock_guard lock(mutex_);
  if (ended_.is_open()) return true;
  failure_ticket_ = ticket;
  flags_ = flags;
  return false;
}

std::pair<CallEnd, std::string> Call::error() {
  if (!done()) return {CallEnd::kNone, ""};
  std::lock_guard lock(mutex_);
  return {how_, text_};
}

PacketPtr Call::take_reply() {
  if (!done()) return nullptr;
  std::lock_guard lock(mutex_);
  return std::exchange(reply_, nullptr);
}

void Call::end(CallEnd how, std::string text, PacketPtr reply, Tickets& tickets) {
  std::lock_guard lock(mutex_);
  how_ = how;
  text_ = std::move(text);
  const bool failed = how != CallEnd::kNone || (reply && reply->verb() == Verb::kFailure) ||
                      (reply && (reply->header.packet.flags & flags_) != 0);
  reply_ = std::move(reply);
  ended_.open();
  if (ticket_ >= 0) tickets.add(ticket_);
  if (failed && failure_ticket_ >= 0) tickets.add(failure_ticket_);
}

void Call::sent(std::vector<std::shared_ptr<OutgoingPart>> apart) {
  std::lock_guard lock(mutex_);
  apart_ = std::move(apart);
}

std::vector<std::shared_ptr<OutgoingPart>> Call::take_sent() {
  std::lock_guard lock(mutex_);
  return std::exchange(apart_, {});
}

}  // namespace shoal
