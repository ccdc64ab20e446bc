#include "engine/messenger.h"

#include <algorithm>
#include <new>

namespace shoal {

bool Messenger::accept(Incoming& incoming, const FrameHeader& header, Link& link) {
  incoming.header = header;
  incoming.link.store(&link, std::memory_order_release);
  if (incoming.allocate) {
    incoming.owned.reset(new (std::nothrow) std::byte[header.total > 0 ? header.total : 1]);
    incoming.data = incoming.owned.get();
    if (incoming.data == nullptr) {  // this may be a thread of our own, where nobody could catch an exception
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

void Messenger::ask_for_rest(Link& link, const FrameHeader& header,
                             const std::shared_ptr<Incoming>& incoming) {
  if (header.total <= header.payload) return;
  link.route(header.message, incoming);
  FrameHeader grant;
  grant.type = FrameType::kGrant;
  grant.group = header.group;
  grant.message = header.message;
  link.send_control(grant);
}

void Messenger::deliver(Early& early, const std::shared_ptr<Incoming>& incoming) {
  if (!accept(*incoming, early.header, *early.link)) return;
  std::copy_n(early.holder->data, early.header.payload, incoming->data);
  incoming->received = early.header.payload;
  if (incoming->received == early.header.total)
    incoming->state.store(Incoming::kDone, std::memory_order_release);
  else
    ask_for_rest(*early.link, early.header, incoming);
}

void Messenger::post(const std::shared_ptr<Incoming>& incoming) {
  std::lock_guard lock(mutex_);
  Key key{incoming->group, incoming->channel};
  auto found = channels_.find(key);
  if (found != channels_.end()) {
    auto& early = found->second.early;
    for (auto it = early.begin(); it != early.end(); ++it) {
      Early& message = **it;
      if (message.claimed || message.header.step != incoming->step) continue;
      if (incoming->source >= 0 && static_cast<std::int32_t>(message.header.source) != incoming->source)
        continue;
      if (message.complete)
        deliver(message, incoming);
      else
        message.claimed = incoming;  // its bytes are being read right now
      if (message.complete) {
        early.erase(it);
        if (early.empty() && found->second.posted.empty()) channels_.erase(found);
      }
      return;
    }
  }
  channels_[key].posted.push_back(incoming);
}

Destination Messenger::on_message(Link& link, const FrameHeader& header) {
  std::lock_guard lock(mutex_);
  if (forgotten_.contains(header.group)) return {};
  const Key key{header.group, header.channel};
  Channel& channel = channels_[key];
  for (auto it = channel.posted.begin(); it != channel.posted.end(); ++it) {
    auto incoming = *it;
    if (incoming->step != header.step) continue;
    if (incoming->source >= 0 && incoming->source != static_cast<std::int32_t>(header.source)) continue;
    channel.posted.erase(it);
    if (channel.posted.empty() && channel.early.empty()) channels_.erase(key);
    if (!accept(*incoming, header, link)) return {};
    return {incoming->data, incoming};
  }
  auto early = std::make_shared<Early>();
  early->header = header;
  early->link = &link;
  early->holder = std::make_shared<Incoming>();
  early->holder->owned = std::make_unique_for_overwrite<std::byte[]>(header.payload > 0 ? header.payload : 1);
  early->holder->data = early->holder->owned.get();
  holders_[early->holder.get()] = early;
  channel.early.push_back(early);
  return {early->holder->data, early->holder};
}

Destination Messenger::on_more(Link& link, const FrameHeader& header) {
  auto incoming = link.routed(header.message, false);
  if (!incoming) return {};
  if (incoming->received + header.payload > incoming->capacity) return {};
  return {incoming->data + incoming->received, incoming};
}

void Messenger::on_payload(Link& link, const FrameHeader& header, const Destination& destination) {
  if (!destination.incoming) return;
  std::lock_guard lock(mutex_);
  auto held = holders_.find(destination.incoming.get());
  if (held == holders_.end()) {
    Incoming& incoming = *destination.incoming;
    incoming.received += header.payload;
    if (incoming.received == header.total) {
      if (header.type == FrameType::kMore) link.routed(header.message, true);
      incoming.state.store(Incoming::kDone, std::memory_order_release);
    } else if (header.type == FrameType::kMessage) {
      ask_for_rest(link, header, destination.incoming);
    }
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
  if (found->second.early.empty() && found->second.posted.empty()) channels_.erase(found);
}

void Messenger::cancel(const std::shared_ptr<Incoming>& incoming) {
  {
    std::lock_guard lock(mutex_);
    auto found = channels_.find(Key{incoming->group, incoming->channel});
    if (found != channels_.end()) {
      found->second.posted.remove(incoming);
      for (auto& early : found->second.early)
        if (early->claimed == incoming) early->claimed = nullptr;
      if (found->second.early.empty() && found->second.posted.empty()) channels_.erase(found);
    }
  }
  if (Link* link = incoming->link.load(std::memory_order_acquire)) link->detach(incoming.get());
}

void Messenger::forget(std::uint64_t group) {
  std::lock_guard lock(mutex_);
  forgotten_.insert(group);
  std::erase_if(channels_,
                [&](const auto& entry) { return entry.first.group == group && entry.second.posted.empty(); });
}

bool Messenger::forgotten(std::uint64_t group) {
  std::lock_guard lock(mutex_);
  return forgotten_.contains(group);
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
