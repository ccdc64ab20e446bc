#include "engine/messages.h"

#include "engine/context.h"

namespace shoal {

Messages::Messages(Operation& op) : op_(op), group_(op.group()) {
  op_.messages.push_back(this);
  if (!op.request().collective()) return;
  for (const Fingerprint& call :
       group_.context().messenger().early_calls(group_.ident(), op.request().channel))
    group_.inquiry().on_peer_call(op.request().channel, call);
}

Messages::~Messages() {
  std::erase(op_.messages, this);
  for (auto& incoming : incoming_)
    if (incoming->state.load(std::memory_order_acquire) < Incoming::kDone)
      group_.context().messenger().cancel(incoming);
  for (auto& [link, message, to] : outgoing_)
    if (!message->done.load(std::memory_order_acquire)) link->cancel(message);
}

void Messages::send(int to, FrameHeader header, const void* data) {
  auto message = std::make_shared<Outgoing>();
  header.group = group_.ident();
  header.source = static_cast<std::uint32_t>(group_.rank());
  message->header = header;
  message->data = static_cast<const std::byte*>(data);
  Link* link = group_.link(to);
  outgoing_.push_back({link, message, to});
  link->send(message);
}

void Messages::send(int to, std::uint32_t step, const void* data, std::uint64_t bytes) {
  FrameHeader header;
  header.channel = op_.request().channel;
  header.step = step;
  header.total = bytes;
  header.late = static_cast<std::uint32_t>(op_.last_to_call() + 1);
  header.call = op_.call();
  send(to, header, data);
}

void Messages::post(std::shared_ptr<Incoming> incoming) {
  incoming->group = group_.ident();
  incoming_.push_back(incoming);
  group_.context().messenger().post(incoming);
}

void Messages::receive(int from, std::uint32_t step, void* data, std::uint64_t bytes) {
  auto incoming = std::make_shared<Incoming>();
  incoming->channel = op_.request().channel;
  incoming->step = step;
  incoming->source = from;
  incoming->data = static_cast<std::byte*>(data);
  incoming->capacity = bytes;
  incoming->call = op_.call();
  post(std::move(incoming));
}

bool Messages::received() {
  for (; received_ < incoming_.size(); ++received_) {
    const Incoming& incoming = *incoming_[received_];
    int state = incoming.state.load(std::memory_order_acquire);
    if (state == Incoming::kRefused) {
      refused_ = true;
      return true;
    }
    if (state == Incoming::kDone) continue;
    op_.set_blocker(incoming.source);
    return false;
  }
  return true;
}

bool Messages::called() {
  for (; called_ < incoming_.size(); ++called_) {
    const Incoming& incoming = *incoming_[called_];
    if (incoming.state.load(std::memory_order_acquire) == Incoming::kPosted) {
      op_.set_blocker(incoming.source);
      return false;
    }
    op_.pass_blocker(incoming.source, static_cast<int>(incoming.header.late) - 1);
  }
  return true;
}

bool Messages::settled() {
  if (!received()) return false;
  if (refused_) return true;
  for (; sent_ < outgoing_.size(); ++sent_) {
    if (outgoing_[sent_].message->done.load(std::memory_order_acquire)) continue;
    op_.set_blocker(outgoing_[sent_].to);
    return false;
  }
  return true;
}

Task Messages::wait(bool (Messages::*finished)()) {
  co_await op_.begun();
  if (!op_.all_called) {
    auto all_called = op_.until_called([this] { return called(); });
    co_await all_called;
    // After the first wait for data an operation waits for more data, not for members.
    for (const auto& incoming : incoming_) op_.all_called |= !op_.has_steps && incoming->capacity > 0;
  }
  auto condition = op_.until([this, finished] { return (this->*finished)(); });
  co_await condition;
  if (refused_) {
    Task mismatch = op_.mismatch();
    co_await mismatch;
  }
}

bool Messages::ungranted(const Operation& op) {
  for (const Messages* messages : op.messages)
    for (auto& [link, message, to] : messages->outgoing_)
      if (link->ungranted(*message)) return true;
  return false;
}

bool Messages::written(const Operation& op) {
  bool all = !op.messages.empty();
  for (const Messages* messages : op.messages)
    for (auto& [link, message, to] : messages->outgoing_) all &= link->written(*message);
  return all;
}

bool Messages::release_sends(const Operation& op) {
  bool all = !op.messages.empty();
  for (const Messages* messages : op.messages)
    for (auto& [link, message, to] : messages->outgoing_) all &= link->cancel(message);
  return all;
}

std::vector<int> Messages::sources_of(const Operation& op) {
  std::vector<int> sources;
  for (const Messages* messages : op.messages)
    for (auto& incoming : messages->incoming_)
      if (incoming->source >= 0 && incoming->state.load(std::memory_order_acquire) < Incoming::kDone)
        sources.push_back(incoming->source);
  return sources;
}

}  // namespace shoal
