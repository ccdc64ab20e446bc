#include "rpc/inbox.h"

#include <utility>

namespace shoal {
namespace {

// A call needs no handler if it was cancelled, its deadline has passed, or its caller is lost.
bool worth_taking(const Packet& packet) {
  const auto& handling = packet.handling;
  return !handling ||
         (!handling->cancelled() && handling->advance(ReceivedCall::kQueued, ReceivedCall::kRunning));
}

}  // namespace

bool Inbox::put(PacketPtr packet) {
  packet->arrived = now_ns();
  std::lock_guard lock(mutex_);
  if (closed()) return true;
  auto found = mailboxes_.find(packet->header.packet.mailbox);
  if (found == mailboxes_.end()) return false;
  Mailbox& mailbox = found->second;
  if (!mailbox.asleep.empty()) {
    if (!worth_taking(*packet)) return true;
    taken_ += packet->header.packet.mailbox == 0;
    Sleeper& sleeper = *mailbox.asleep.back();
    mailbox.asleep.pop_back();
    sleeper.packet = std::move(packet);
    sleeper.woken.open();  // last: then the sleeper may be destroyed
    return true;
  }
  packet->place = ++arrivals_;
  packet->taken_before = taken_;
  const std::uint64_t place = packet->place;
  mailbox.packets.emplace_hint(mailbox.packets.end(), place, std::move(packet));
  return true;
}

void Inbox::remove(const Packet& packet) {
  PacketPtr removed;  // destroyed after the lock is released: it returns what it held
  std::lock_guard lock(mutex_);
  auto mailbox = mailboxes_.find(packet.header.packet.mailbox);
  if (mailbox == mailboxes_.end()) return;
  auto found = mailbox->second.packets.find(packet.place);
  if (found == mailbox->second.packets.end() || found->second.get() != &packet) return;
  removed = std::move(found->second);
  mailbox->second.packets.erase(found);
}

bool Inbox::take(std::uint32_t number, std::int64_t until, std::size_t most,
                 std::vector<PacketPtr>& packets) {
  std::vector<PacketPtr> stale;  // destroyed after the lock is released, as above
  Sleeper self;
  {
    std::lock_guard lock(mutex_);
    auto found = mailboxes_.find(number);
    if (found == mailboxes_.end()) return false;
    Mailbox& mailbox = found->second;
    while (!mailbox.packets.empty() && packets.size() < most) {
      auto first = mailbox.packets.begin();
      (worth_taking(*first->second) ? packets : stale).push_back(std::move(first->second));
      mailbox.packets.erase(first);
    }
    if (number == 0) taken_ += packets.size();
    if (!packets.empty() || most == 0 || until <= now_ns()) return true;
    mailbox.asleep.push_back(&self);
  }
  stale.clear();
  if (!self.woken.wait(until)) {
    std::lock_guard lock(mutex_);
    if (auto found = mailboxes_.find(number); found != mailboxes_.end())
      std::erase(found->second.asleep, &self);
  }
  // With the lock held, no packet can be handed over; one that came at the last moment is here now.
  std::lock_guard lock(mutex_);
  if (self.packet) packets.push_back(std::move(self.packet));
  return !packets.empty() || mailboxes_.contains(number);
}

std::size_t Inbox::waiting(std::uint32_t mailbox) {
  std::lock_guard lock(mutex_);
  auto found = mailboxes_.find(mailbox);
  return found == mailboxes_.end() ? 0 : found->second.packets.size();
}

std::size_t Inbox::waiting() {
  std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& [number, mailbox] : mailboxes_) sum += mailbox.packets.size();
  return sum;
}

std::optional<std::size_t> Inbox::ahead_of(const Packet& packet) {
  std::lock_guard lock(mutex_);
  auto mailbox = mailboxes_.find(packet.header.packet.mailbox);
  if (mailbox == mailboxes_.end()) return std::nullopt;
  const auto& packets = mailbox->second.packets;
  auto found = packets.find(packet.place);
  if (found == packets.end() || found->second.get() != &packet) return std::nullopt;
  return static_cast<std::size_t>(std::distance(packets.begin(), found));
}

Inbox::Neglect Inbox::idle_backlog() {
  std::lock_guard lock(mutex_);
  auto found = mailboxes_.find(0);
  if (found == mailboxes_.end() || !found->second.asleep.empty() || found->second.packets.empty()) return {};
  const Packet& oldest = *found->second.packets.begin()->second;
  return {oldest.arrived, oldest.taken_before, taken_};
}

void Inbox::open(std::uint32_t number) {
  std::lock_guard lock(mutex_);
  if (!closed()) mailboxes_.try_emplace(number);
}

void Inbox::release(std::uint32_t number) {
  if (number == 0) return;
  Mailbox dropped;  // destroyed after the lock is released, as above
  std::lock_guard lock(mutex_);
  auto found = mailboxes_.find(number);
  if (found == mailboxes_.end()) return;
  for (Sleeper* sleeper : found->second.asleep) sleeper->woken.open();
  dropped = std::move(found->second);
  mailboxes_.erase(found);
}

void Inbox::close() {
  std::unordered_map<std::uint32_t, Mailbox> dropped;  // destroyed after the lock is released, as above
  std::lock_guard lock(mutex_);
  for (auto& [number, mailbox] : mailboxes_) {
    for (Sleeper* sleeper : mailbox.asleep) sleeper->woken.open();
    mailbox.asleep.clear();
  }
  dropped.swap(mailboxes_);
}

}  // namespace shoal
