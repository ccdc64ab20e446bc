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
  for (auto& [link, message] : outgoing_)
    if (!message->done.load(std::memory_order_acquire)) link->cancel(message);
}

void Messages::send(int to, FrameHeader header, const void* data) {
  auto message = std::make_shared<Outgoing>();
  header.group = group_.ident();
  header.source = static_cast<std::uint32_t>(group_.rank());
  message->header = header;
  message->data = static_cast<const std::byte*>(data);
  Link* link = group_.link(to);
  outgoing_.emplace_back(link, message);
  link->send(message);
}

void Messages::send(int to, std::uint32_t step, const void* data, std::uint64_t bytes) {
  FrameHeader header;
  header.channel = op_.request().channel;
  header.step = step;
  header.total = bytes;
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
    int state = incoming_[received_]->state.load(std::memory_order_acquire);
    if (state == Incoming::kRefused) {
      refused_ = true;
      return true;
    }
    if (state != Incoming::kDone) return false;
  }
  return true;
}

bool Messages::settled() {
  if (!received()) return false;
  if (refused_) return true;
  for (; sent_ < outgoing_.size(); ++sent_)
    if (!outgoing_[sent_].second->done.load(std::memory_order_acquire)) return false;
  return true;
}

Task Messages::finish() {
  auto begun = op_.begun();
  co_await begun;
  auto condition = op_.until([this] { return settled(); });
  co_await condition;
  if (refused_) {
    Task mismatch = op_.mismatch();
    co_await mismatch;
  }
}

Task Messages::finish_receives() {
  auto begun = op_.begun();
  co_await begun;
  auto condition = op_.until([this] { return received(); });
  co_await condition;
  if (refused_) {
    Task mismatch = op_.mismatch();
    co_await mismatch;
  }
}

bool Messages::ungranted(const Operation& op) {
  for (const Messages* messages : op.messages)
    for (auto& [link, message] : messages->outgoing_)
      if (link->ungranted(*message)) return true;
  return false;
}

bool Messages::written(const Operation& op) {
  bool all = !op.messages.empty();
  for (const Messages* messages : op.messages)
    for (auto& [link, message] : messages->outgoing_) all &= link->written(*message);
  return all;
}

bool Messages::release_sends(const Operation& op) {
  bool all = !op.messages.empty();
  for (const Messages* messages : op.messages)
    for (auto& [link, message] : messages->outgoing_) all &= link->cancel(message);
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
