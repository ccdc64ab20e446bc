#include "rpc/peer.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <unordered_set>
#include <utility>

#include "common/clock.h"
#include "rpc/endpoint.h"

namespace shoal {
namespace {

// The part of a link's window (kUnreadLimit) for calls and endpoints; the rest is for replies, which never
// wait. It must be larger than the bytes that a receiver holds before it sends a credit, or both sides would
// wait.
constexpr std::uint64_t kPacketWindow = kUnreadLimit / 4 * 3;
constexpr std::uint64_t kQueueLimit = 64 << 20;  // bytes queued here before submitters must wait

}  // namespace

Peer::Peer(RpcEndpoint& endpoint, int id, int fd, int epoll, std::int64_t ticket)
    : id(id), ticket(ticket), link(id, endpoint, fd, epoll), arrivals(*this, endpoint) {}

// -- sending ----------------------------------------------------------------------------------------

bool Peer::fits(const OutgoingPacket& outgoing) {
  const auto first = std::min<std::uint64_t>(outgoing.messages[0]->header.total, kEager);
  return link.lent() + first + kHeaderCharge <= kPacketWindow;
}

// Requires `sending_`.
void Peer::transmit(OutgoingPacket& outgoing, const CallPtr& call) {
  if (call) {
    if (call->number < last_sent_ && !renumber(call)) return;
    last_sent_ = call->number;
    FrameHeader& header = outgoing.messages[0]->header;
    if (call->deadline != 0) {
      constexpr std::int64_t kLongestDeadline = std::numeric_limits<std::uint32_t>::max();
      const std::int64_t left = (call->deadline - now_ns() + kMillisecond - 1) / kMillisecond;
      header.packet.deadline_ms =
          static_cast<std::uint32_t>(std::clamp<std::int64_t>(left, 1, kLongestDeadline));
    }
    for (auto& message : outgoing.messages) message->header.channel = call->number;
  }
  for (auto& message : outgoing.messages) {
    if (message->loan) message->loan->sent();
    link.send(message);
  }
  if (!call) return;
  std::erase_if(outgoing.messages, [](const auto& message) { return message->done.load(); });
  if (outgoing.messages.empty()) return;
  call->sent(std::move(outgoing.messages));
  if (call->claimed())  // it ended before it was given its messages
    for (auto& message : call->take_sent()) link.cancel(message);
}

bool Peer::await_room(std::uint64_t bytes, std::int64_t until, bool stage) {
  std::unique_lock lock(sending_);
  auto has_room = [&] {
    const std::uint64_t used = queued_ + staged_;
    return used == 0 || used + bytes <= kQueueLimit || lost_.load();
  };
  while (!has_room()) {
    const std::int64_t left = until - now_ns();
    if (left <= 0) return false;
    room_.wait_for(lock, std::chrono::nanoseconds(left));
  }
  if (stage) staged_ += bytes;
  return true;
}

void Peer::unstage(std::uint64_t bytes) {
  std::lock_guard lock(sending_);
  staged_ -= bytes;
  room_.notify_all();
}

bool Peer::register_call(const CallPtr& call) {
  std::lock_guard calls(calls_mutex_);
  if (lost_) return false;
  if (call) {
    call->number = made_.load(std::memory_order_relaxed) + 1;
    made_.store(call->number, std::memory_order_release);
    pending_.emplace(call->number, call);
  }
  return true;
}

// The numbers of calls must rise from packet to packet; false if the call has ended.
bool Peer::renumber(const CallPtr& call) {
  std::lock_guard calls(calls_mutex_);
  if (pending_.erase(call->number) == 0) return false;
  call->number = made_.fetch_add(1) + 1;
  pending_.emplace(call->number, call);
  return true;
}

// Whether a packet to `mailbox` may be sent before everything in the outbox.
bool Peer::may_pass(std::uint32_t mailbox) const {
  return outbox_.empty() || (held_ == outbox_.size() && !mailboxes_.contains(mailbox));
}

bool Peer::submit(OutgoingPacket outgoing, const CallPtr& call) {
  std::lock_guard lock(sending_);
  if (!register_call(call)) return false;
  const std::uint32_t mailbox = outgoing.messages[0]->header.packet.mailbox;
  if (may_pass(mailbox) && fits(outgoing)) {
    transmit(outgoing, call);
    return true;
  }
  if (outbox_.empty()) blocked_since_ = now_ns();
  queued_ += outgoing.bytes;
  ++submitted_;
  if (call) call->queued_at = submitted_;
  outbox_.emplace(submitted_, Queued{std::move(outgoing), call, mailbox});
  if (mailbox != 0) ++mailboxes_[mailbox];
  if (held_ != 0) pump();
  return true;
}

bool Peer::hold(std::uint32_t mailbox, const CallPtr& call, bool one_way) {
  std::lock_guard lock(sending_);
  if (!register_call(one_way ? nullptr : call)) return false;
  if (outbox_.empty()) blocked_since_ = now_ns();
  call->queued_at = ++submitted_;
  outbox_.emplace(submitted_, Queued{{}, one_way ? nullptr : call, mailbox, true});
  ++held_;
  if (mailbox != 0) ++mailboxes_[mailbox];
  return true;
}

bool Peer::fill(Call& call, OutgoingPacket outgoing) {
  std::lock_guard lock(sending_);
  auto found = outbox_.find(call.queued_at);
  if (found == outbox_.end() || !found->second.held) return false;
  found->second.held = false;
  --held_;
  queued_ += outgoing.bytes;
  found->second.outgoing = std::move(outgoing);
  pump();
  return true;
}

// Requires `sending_`.
void Peer::remove_queued(std::map<std::uint64_t, Queued>::iterator queued) {
  const Queued& gone = queued->second;
  if (gone.held) --held_;
  queued_ -= gone.outgoing.bytes;
  if (auto found = mailboxes_.find(gone.mailbox); found != mailboxes_.end() && --found->second == 0)
    mailboxes_.erase(found);
  outbox_.erase(queued);
}

// Requires `sending_`.  Sends queued packets in order; a held packet blocks later packets to its mailbox.
void Peer::pump() {
  std::unordered_set<std::uint32_t> kept_back;
  std::size_t ready = outbox_.size() - held_;
  bool any = false;
  for (auto at = outbox_.begin(); ready > 0;) {
    const auto queued = at++;
    Queued& next = queued->second;
    if (next.held) {
      if (next.mailbox != 0) kept_back.insert(next.mailbox);
      continue;
    }
    --ready;
    if (kept_back.contains(next.mailbox)) continue;
    if (!fits(next.outgoing)) break;
    if (!next.call || !next.call->claimed()) transmit(next.outgoing, next.call);
    remove_queued(queued);
    any = true;
  }
  if (any) room_.notify_all();
}

bool Peer::reply(OutgoingPacket outgoing, std::uint64_t number) {
  std::lock_guard lock(sending_);
  if (lost_) return false;
  for (auto& message : outgoing.messages) message->header.channel = number;
  transmit(outgoing, nullptr);
  return true;
}

void Peer::credited(std::uint64_t bytes) {
  link.credited(bytes);
  std::lock_guard lock(sending_);
  blocked_since_ = now_ns();
  pump();
}

void Peer::control(FrameType type, std::uint64_t call, std::uint16_t code, const std::string& text) {
  FrameHeader header;
  header.type = type;
  header.channel = call;
  header.code = code;
  link.send_control(header, text.data(), text.size());
}

void Peer::stop_sending(Call& call) {
  {
    std::lock_guard lock(sending_);
    if (auto found = outbox_.find(call.queued_at); found != outbox_.end()) {
      remove_queued(found);
      pump();  // packets that waited behind it
      room_.notify_all();
      return;
    }
  }
  for (auto& message : call.take_sent()) link.cancel(message);
}

bool Peer::all_sent() {
  std::lock_guard lock(sending_);
  return lost_ || (outbox_.empty() && link.idle());
}

std::uint64_t Peer::queued() {
  std::lock_guard lock(sending_);
  return queued_;
}

std::string Peer::unsent(const Call& call, std::int64_t now) {
  std::lock_guard lock(sending_);
  const auto found = outbox_.find(call.queued_at);
  if (found == outbox_.end()) return "";
  return found->second.held ? "its device has not handed its tensors over yet" : backlog(now);
}

std::string Peer::queue_full_reason(std::int64_t now) {
  std::lock_guard lock(sending_);
  return backlog(now);
}

std::string Peer::backlog(std::int64_t now) const {
  return "takes nothing for " + seconds(now - blocked_since_) + ", " + std::to_string(outbox_.size()) +
         " packets queued";
}

// -- calls ------------------------------------------------------------------------------------------

CallPtr Peer::pending(std::uint64_t number) {
  std::lock_guard lock(calls_mutex_);
  auto found = pending_.find(number);
  return found == pending_.end() ? nullptr : found->second;
}

void Peer::forget(const Call& call) {
  std::lock_guard lock(calls_mutex_);
  pending_.erase(call.number);
}

std::vector<CallPtr> Peer::all_pending() {
  std::lock_guard lock(calls_mutex_);
  std::vector<CallPtr> all;
  all.reserve(pending_.size());
  for (auto& [number, call] : pending_) all.push_back(call);
  return all;
}

void Peer::handling(std::uint64_t number, const std::shared_ptr<ReceivedCall>& handling,
                    const PacketPtr& packet) {
  std::lock_guard lock(calls_mutex_);
  handled_[number] = {handling, packet};
}

std::pair<std::shared_ptr<ReceivedCall>, PacketPtr> Peer::handled(std::uint64_t number) {
  std::lock_guard lock(calls_mutex_);
  auto found = handled_.find(number);
  if (found == handled_.end()) return {};
  return {found->second.handling, found->second.packet.lock()};
}

void Peer::answered(std::uint64_t number) {
  std::lock_guard lock(calls_mutex_);
  handled_.erase(number);
}

std::size_t Peer::handled() {
  std::lock_guard lock(calls_mutex_);
  return handled_.size();
}

std::vector<std::pair<std::uint64_t, std::shared_ptr<ReceivedCall>>> Peer::all_handled() {
  std::lock_guard lock(calls_mutex_);
  std::vector<std::pair<std::uint64_t, std::shared_ptr<ReceivedCall>>> all;
  all.reserve(handled_.size());
  for (auto& [number, entry] : handled_) all.emplace_back(number, entry.handling);
  return all;
}

void Peer::lose(std::vector<CallPtr>& pending, std::vector<std::shared_ptr<ReceivedCall>>& handled) {
  std::map<std::uint64_t, Queued> dropped;  // destroyed after the locks are released
  std::lock_guard lock(sending_);
  std::lock_guard calls(calls_mutex_);
  lost_ = true;
  for (auto& [number, call] : pending_) pending.push_back(std::move(call));
  std::sort(pending.begin(), pending.end(), [](auto& a, auto& b) { return a->number < b->number; });
  for (auto& [number, entry] : handled_) handled.push_back(std::move(entry.handling));
  pending_.clear();
  handled_.clear();
  dropped.swap(outbox_);
  mailboxes_.clear();
  queued_ = held_ = 0;
  room_.notify_all();
}

}  // namespace shoal
