#include "engine/messenger.h"

#include <algorithm>
#include <new>

#include "net/check.h"

namespace shoal {

bool Messenger::accept(Incoming& incoming, const FrameHeader& header, Link& link) {
  incoming.header = header;
  incoming.link.store(&link, std::memory_order_release);
  incoming.from.store(static_cast<std::int32_t>(header.source), std::memory_order_release);
  if (incoming.allocate) {
    incoming.owned.reset(new (std::nothrow) std::byte[header.total > 0 ? header.total : 1],
                         std::default_delete<std::byte[]>());
    incoming.data = incoming.owned.get();
    if (incoming.data == nullptr) {  // no exception: nobody could catch it in a thread of the engine
      incoming.state.store(Incoming::kRefused, std::memory_order_release);
      return false;
    }
    incoming.capacity = header.total;
  } else {
    bool same = (header.channel & kPointToPoint) != 0 ? incoming.dtype == header.shape.dtype
                                                      : incoming.call == header.call;
    if (!same || incoming.capacity != header.total) {
      incoming.state.store(Incoming::kRefused, std::memory_order_release);
      return false;
    }
  }
  incoming.state.store(Incoming::kMatched, std::memory_order_release);
  return true;
}

void Messenger::after_first_frame(Link& link, const FrameHeader& header,
                                  const std::shared_ptr<Incoming>& incoming) {
  incoming->received = header.payload;
  if (partial(header))
    link.ask_for_rest(header, incoming);
  else
    incoming->state.store(Incoming::kDone, std::memory_order_release);
}

void Messenger::deliver(Early& early, const std::shared_ptr<Incoming>& incoming) {
  if (!accept(*incoming, early.header, *early.link)) return;
  std::copy_n(early.holder->data, early.header.payload, incoming->data);
  after_first_frame(*early.link, early.header, incoming);
}

void Messenger::post(const std::shared_ptr<Incoming>& incoming) {
  std::lock_guard lock(mutex_);
  if (!match_early(incoming)) channels_[{incoming->group, incoming->channel}].posted.push_back(incoming);
}

bool Messenger::match_early(const std::shared_ptr<Incoming>& incoming) {
  auto found = channels_.find(Key{incoming->group, incoming->channel});
  if (found == channels_.end()) return false;
  auto& early = found->second.early;
  for (auto it = early.begin(); it != early.end(); ++it) {
    Early& message = **it;
    if (message.claimed || message.header.step != incoming->step) continue;
    if (incoming->source >= 0 && static_cast<std::int32_t>(message.header.source) != incoming->source)
      continue;
    if (!message.complete) {
      message.claimed = incoming;  // its bytes are just being read
      return true;
    }
    deliver(message, incoming);
    early.erase(it);
    if (found->second.empty()) channels_.erase(found);
    return true;
  }
  return false;
}

void Messenger::post_again(const std::shared_ptr<Incoming>& incoming) {
  incoming->received = 0;
  incoming->from.store(-1, std::memory_order_relaxed);
  incoming->link.store(nullptr, std::memory_order_relaxed);
  if (incoming->allocate) {
    incoming->owned.reset();
    incoming->data = nullptr;
  }
  incoming->state.store(Incoming::kPosted, std::memory_order_release);
  if (!match_early(incoming)) channels_[{incoming->group, incoming->channel}].posted.push_front(incoming);
}

void Messenger::repost(const std::shared_ptr<Incoming>& incoming, int from) {
  {
    std::lock_guard lock(mutex_);
    // Meanwhile the rest has arrived, or the receive was posted again and has another message.
    if (incoming->from.load() != from || incoming->state.load() == Incoming::kDone) return;
    incoming->cancelled = true;  // on_withdrawn() leaves it alone from now on
  }
  cancel(incoming, true);
  std::lock_guard lock(mutex_);
  incoming->cancelled = false;
  post_again(incoming);
}

void Messenger::on_withdrawn(Link& link, const FrameHeader& header) {
  std::lock_guard lock(mutex_);
  if (auto incoming = link.unroute(header.message)) {
    if (!incoming->cancelled) post_again(incoming);
    return;
  }
  auto found = channels_.find(Key{header.group, header.channel});
  if (found == channels_.end()) return;
  std::erase_if(found->second.early, [&](const auto& early) {
    return early->link == &link && early->header.message == header.message && partial(early->header);
  });
  if (found->second.empty()) channels_.erase(found);
}

Destination Messenger::on_message(Link& link, const FrameHeader& header) {
  std::lock_guard lock(mutex_);
  if (auto found = groups_.find(header.group); found != groups_.end() && !found->second.open) return {};
  const Key key{header.group, header.channel};
  Channel& channel = channels_[key];
  for (auto it = channel.posted.begin(); it != channel.posted.end(); ++it) {
    auto incoming = *it;
    if (incoming->step != header.step) continue;
    if (incoming->source >= 0 && incoming->source != static_cast<std::int32_t>(header.source)) continue;
    channel.posted.erase(it);
    if (channel.empty()) channels_.erase(key);
    if (!accept(*incoming, header, link)) return {};
    return {incoming->data, incoming};
  }
  auto early = std::make_shared<Early>();
  early->header = header;
  early->link = &link;
  early->charge = link.take_charge();
  early->holder = std::make_shared<Incoming>();
  early->holder->owned = buffers_->scratch(header.payload);
  early->holder->data = early->holder->owned.get();
  holders_[early->holder.get()] = early;
  channel.early.push_back(early);
  return {early->holder->data, early->holder};
}

Destination Messenger::on_more(Link& link, const FrameHeader& header) {
  auto incoming = link.routed(header.message);
  if (!incoming) return {};
  return {incoming->data + incoming->received, incoming};
}

void Messenger::on_payload(Link& link, const FrameHeader& header, const Destination& destination) {
  if (!destination.incoming) return;
  std::lock_guard lock(mutex_);
  auto held = holders_.find(destination.incoming.get());
  if (held == holders_.end()) {
    Incoming& incoming = *destination.incoming;
    if (incoming.cancelled) {  // otherwise the sender would wait for a grant
      if (header.type == FrameType::kMessage && partial(header)) link.decline(header);
      return;
    }
    if (header.type == FrameType::kMessage) return after_first_frame(link, header, destination.incoming);
    incoming.received += header.payload;
    if (incoming.received == header.total) incoming.state.store(Incoming::kDone, std::memory_order_release);
    return;
  }
  auto early = held->second;
  holders_.erase(held);
  early->complete = true;
  if (!early->claimed) return;
  deliver(*early, early->claimed);
  auto found = channels_.find(Key{header.group, header.channel});
  if (found == channels_.end()) return;
  found->second.early.remove(early);
  if (found->second.empty()) channels_.erase(found);
}

void Messenger::cancel(const std::shared_ptr<Incoming>& incoming, bool forget) {
  {
    std::lock_guard lock(mutex_);
    incoming->cancelled = true;
    auto found = channels_.find(Key{incoming->group, incoming->channel});
    if (found != channels_.end()) {
      found->second.posted.remove(incoming);
      for (auto& early : found->second.early)
        if (early->claimed == incoming) early->claimed = nullptr;
      if (found->second.empty()) channels_.erase(found);
    }
  }
  if (Link* link = incoming->link.load(std::memory_order_acquire)) link->detach(incoming.get(), forget);
}

void Messenger::open(std::uint64_t group, std::vector<int> others) {
  std::lock_guard lock(mutex_);
  groups_[group] = {true, std::move(others)};
}

void Messenger::forget(std::uint64_t group) {
  std::lock_guard lock(mutex_);
  std::erase_if(channels_, [&](const auto& entry) { return entry.first.group == group; });
  auto found = groups_.find(group);
  if (found == groups_.end()) return;
  found->second.open = false;
  if (found->second.is_finished()) groups_.erase(found);
}

bool Messenger::known(std::uint64_t group) {
  std::lock_guard lock(mutex_);
  return groups_.contains(group);
}

void Messenger::left(std::uint64_t group, int peer) {
  std::lock_guard lock(mutex_);
  auto found = groups_.find(group);
  if (found == groups_.end()) return;
  std::erase(found->second.others, peer);
  if (found->second.is_finished()) groups_.erase(found);
}

void Messenger::gone(int peer) {
  std::lock_guard lock(mutex_);
  for (auto& [group, membership] : groups_) std::erase(membership.others, peer);
  std::erase_if(groups_, [](const auto& entry) { return entry.second.is_finished(); });
  std::vector<std::shared_ptr<Incoming>> claims;
  for (auto& [key, channel] : channels_)
    std::erase_if(channel.early, [&](const auto& early) {
      if (early->link->peer() != peer || (early->complete && !partial(early->header))) return false;
      if (early->claimed) claims.push_back(early->claimed);
      early->holder->cancelled = true;  // its first bytes may still be arriving
      holders_.erase(early->holder.get());
      return true;
    });
  drop_empty();
  for (auto& incoming : claims) post_again(incoming);
}

std::vector<std::pair<Link*, const char*>> Messenger::flawed(std::uint64_t group,
                                                             const std::vector<int>& ranks) {
  std::vector<std::pair<Link*, const char*>> flaws;
  std::lock_guard lock(mutex_);
  for (auto& [key, channel] : channels_)
    if (key.group == group)
      std::erase_if(channel.early, [&](const auto& early) {
        const char* flaw = flaw_in_group(early->header, early->link->peer(), ranks);
        if (flaw != nullptr) flaws.emplace_back(early->link, flaw);
        return flaw != nullptr;
      });
  drop_empty();
  return flaws;
}

// Requires the lock.
void Messenger::drop_empty() {
  std::erase_if(channels_, [](const auto& entry) { return entry.second.empty(); });
}

void Messenger::clear() {
  std::lock_guard lock(mutex_);
  channels_.clear();
  holders_.clear();
}

std::pair<std::size_t, std::size_t> Messenger::held() {
  std::lock_guard lock(mutex_);
  std::size_t early = 0;
  for (const auto& [key, channel] : channels_) early += channel.early.size();
  return {groups_.size(), early};
}

std::vector<Fingerprint> Messenger::early_calls(std::uint64_t group, std::uint64_t channel) {
  std::vector<Fingerprint> calls;
  std::lock_guard lock(mutex_);
  auto found = channels_.find(Key{group, channel});
  if (found == channels_.end()) return calls;
  for (auto& early : found->second.early) calls.push_back(early->header.call);
  return calls;
}

}  // namespace shoal
