// The endpoint's thread: reads the connections, keeps deadlines and detects lost peers.

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "common/clock.h"
#include "rpc/endpoint.h"

namespace shoal {
namespace {

constexpr std::int64_t kAnswerTime = 200 * kMillisecond;  // for the callee's report on an overdue call
constexpr std::int64_t kShortCall = kMillisecond / 2;     // shorter handlers need no additional threads
constexpr std::int64_t kLongestSleep = 3'600'000;         // ms
constexpr const char* kEnded = "its process has ended";

}  // namespace

// -- deadlines --------------------------------------------------------------------------------------

void RpcEndpoint::set_deadline(const CallPtr& call, std::int64_t at) {
  std::lock_guard lock(deadlines_mutex_);
  call->due = at;
  deadlines_.emplace(std::pair{at, call->unique}, call);
  if (at >= sleeps_until_) return;
  sleeps_until_ = at;
  wake();
}

void RpcEndpoint::forget_deadline(const Call& call) {
  if (call.deadline == 0) return;
  std::lock_guard lock(deadlines_mutex_);
  deadlines_.erase({call.due, call.unique});
}

// An overdue call ends when the callee's endpoint has reported its status, or did not report in time.
void RpcEndpoint::expire(std::int64_t now) {
  std::vector<CallPtr> due;
  {
    std::lock_guard lock(deadlines_mutex_);
    while (!deadlines_.empty() && deadlines_.begin()->first.first <= now) {
      due.push_back(std::move(deadlines_.begin()->second));
      deadlines_.erase(deadlines_.begin());
    }
  }
  for (const CallPtr& call : due) {
    const auto peer = find(call->peer);
    if (!peer || call->claimed()) continue;
    std::string unsent = peer->unsent(*call, now);
    if (unsent.empty() && !call->asked.exchange(true)) {
      set_deadline(call, now + kAnswerTime);
      peer->control(FrameType::kAskCall, call->number);
      continue;
    }
    overdue(*peer, call, unsent.empty() ? "its endpoint does not answer" : std::move(unsent));
  }
}

void RpcEndpoint::overdue(Peer& peer, const CallPtr& call, std::string known) {
  if (!call->claim()) return;
  ended(peer, call, CallEnd::kTimeout, std::move(known), nullptr);
  peer.control(FrameType::kCancelCall, call->number);
}

// -- the thread -------------------------------------------------------------------------------------

std::int64_t RpcEndpoint::next_wake() {
  std::int64_t at = kNever;
  {
    std::lock_guard lock(peers_mutex_);
    for (auto& [id, peer] : peers_)
      if (!peer->local) at = heartbeat_.next();
  }
  if (const std::int64_t since = inbox_.idle_backlog().since; since != 0 && watch_ticket_ >= 0)
    at = std::min(at, std::max(since, last_watch_) + inbox_alarm_delay_);
  if (const auto from = lender()) at = std::min(at, from->tidy_at());
  at = std::min(at, buffers_->tidy_at());
  std::lock_guard lock(deadlines_mutex_);
  if (!deadlines_.empty()) at = std::min(at, deadlines_.begin()->first.first);
  // The deadline of an ended call is kept as a time to wake: the next call's deadline is later, so its caller
  // need not wake this thread.
  if (sleeps_until_ > now_ns()) at = std::min(at, sleeps_until_);
  sleeps_until_ = at;
  return at;
}

void RpcEndpoint::run() {
  epoll_event events[64];
  while (!stop_.load(std::memory_order_acquire)) {
    const std::int64_t at = next_wake();
    const std::int64_t left = at == kNever ? -1 : std::max<std::int64_t>(0, at - now_ns());
    const int patience =
        left < 0 ? -1 : static_cast<int>(std::min<std::int64_t>(left / kMillisecond + 1, kLongestSleep));
    const int count = epoll_wait(epoll_, events, 64, left == 0 ? 0 : patience);
    for (int i = 0; i < count; ++i) {
      const std::uint64_t what = events[i].data.u64;
      if (what == kWakeup) {
        std::uint64_t rings;
        (void)!read(wakeup_, &rings, sizeof rings);
        continue;
      }
      const auto peer = find(static_cast<int>(what & 0xffffffffULL));
      if (!peer && (what & kPidfd)) release_peer_buffers(static_cast<int>(what & 0xffffffffULL), true);
      if (!peer) continue;
      if (what & kPidfd) {
        // Frames that it sent before still count.
        reading_ = peer.get();
        peer->link.receive_all();
        end_of(*peer, kEnded);
      } else {
        serve(*peer, events[i].events);
      }
    }
    const std::int64_t now = now_ns();
    if (room_.exchange(false))
      for (auto& peer : all_peers()) peer->arrivals.grant_waiting();
    expire(now);
    beat(now);
    check_inbox(now);
    tidy(now);
  }
}

void RpcEndpoint::serve(Peer& peer, std::uint32_t events) {
  if (events & EPOLLOUT) peer.link.flush();
  if ((events & (EPOLLIN | EPOLLERR | EPOLLHUP)) == 0) return;
  reading_ = &peer;
  peer.link.receive();
  if (peer.link.broken()) end_of(peer, "its connection closed");
}

// The connection has ended; a reason found while reading takes precedence over `why`.
void RpcEndpoint::end_of(Peer& peer, const char* why) {
  std::string found = std::exchange(end_, {});
  lose(peer, found.empty() ? why : std::move(found));
  reading_ = nullptr;
}

const PacketState* RpcEndpoint::packets(Link&) { return &reading_->arrivals.state(); }

Destination RpcEndpoint::on_header(Link&, const FrameHeader& header) {
  if (header.type == FrameType::kMessage || header.type == FrameType::kMore)
    return reading_->arrivals.on_header(header);
  text_.resize(header.payload);
  return {reinterpret_cast<std::byte*>(text_.data()), nullptr};
}

void RpcEndpoint::on_frame(Link& link, const FrameHeader& header, const Destination& destination) {
  Peer& peer = *reading_;
  switch (header.type) {
    case FrameType::kMessage:
    case FrameType::kMore:
      return peer.arrivals.on_frame(header, destination);
    case FrameType::kGrant:
      return link.granted(header.message, header.code == kDeclined);
    case FrameType::kWithdrawn:
      return peer.arrivals.on_withdrawn(header);
    case FrameType::kCredit:
      return peer.credited(header.total);
    case FrameType::kCancelCall:
      return cancelled_by_peer(header.channel);
    case FrameType::kAskCall:
      return peer.control(FrameType::kTellCall, header.channel, 0, status(header.channel));
    case FrameType::kTellCall:
      return on_status_report(header);
    case FrameType::kBye:
      end_ = "it has left";
      return link.refuse("its goodbye");  // nothing follows
    default:
      return;
  }
}

void RpcEndpoint::on_link_lost(Link&, LinkEnd end, const char* why) {
  if (!end_.empty()) return;
  end_ = end == LinkEnd::kClosed ? "its connection closed"
                                 : std::string("it sent ") + why + "; the connection to it was cut";
}

void RpcEndpoint::packet_arrived(PacketPtr packet) {
  if (inbox_.put(packet) || !packet->handling) return;
  reading_->answered(packet->call);
  reading_->control(FrameType::kTellCall, packet->call, 1, "its mailbox is closed");
}

void RpcEndpoint::cancelled_by_peer(std::uint64_t number) {
  reading_->arrivals.drop(number);
  auto [handling, packet] = reading_->handled(number);
  if (!handling) return;
  handling->withdraw_reply(tickets_);
  if (handling->state() != ReceivedCall::kQueued) return;
  if (packet) inbox_.remove(*packet);
  reading_->answered(number);
}

// Returns the state of a received call, as text.
std::string RpcEndpoint::status(std::uint64_t number) {
  if (number > reading_->arrivals.state().last) return "never received";
  auto [handling, packet] = reading_->handled(number);
  if (!handling) return "its handler has ended";
  switch (handling->state()) {
    case ReceivedCall::kArriving:
      return "not yet received as a whole";
    case ReceivedCall::kQueued:
      if (auto ahead = packet ? inbox_.ahead_of(*packet) : std::nullopt)
        return "queued behind " + std::to_string(*ahead);
      return "queued";
    case ReceivedCall::kRunning:
      return handling->running(now_ns());
    default:
      return "its handler has ended";
  }
}

void RpcEndpoint::on_status_report(const FrameHeader& header) {
  const CallPtr call = reading_->pending(header.channel);
  if (!call) return;
  if (header.code == 1) {
    if (call->claim()) ended(*reading_, call, CallEnd::kRefused, text_, nullptr);
    return;
  }
  if (call->asked.load()) overdue(*reading_, call, text_);
}

// -- periodic work --------------------------------------------------------------------------------------

void RpcEndpoint::beat(std::int64_t now) {
  if (!heartbeat_.due(now)) return;
  FrameHeader beat;
  beat.type = FrameType::kHeartbeat;
  for (auto& peer : all_peers()) {
    if (peer->local) continue;
    if (!silent_.load() && !peer->link.backlog()) peer->link.send_control(beat);
    if (std::string silence = heartbeat_.silence(peer->link.last_heard(), now); !silence.empty())
      lose(*peer, std::move(silence));
  }
}

void RpcEndpoint::tidy(std::int64_t now) {
  if (now >= buffers_->tidy_at()) buffers_->tidy(now);
  const auto from = lender();
  if (!from || now < from->tidy_at()) return;
  from->tidy(now);
  std::vector<int> lost_peers;
  {
    std::lock_guard lock(peers_mutex_);
    for (auto& [id, pidfd] : departed_) lost_peers.push_back(id);
  }
  for (int id : lost_peers) release_peer_buffers(id, false);
}

void RpcEndpoint::watch_inbox(std::int64_t ticket, std::int64_t patience) {
  inbox_alarm_delay_ = patience;
  watch_ticket_ = ticket;
  wake();
}

void RpcEndpoint::check_inbox(std::int64_t now) {
  const auto idle_backlog = inbox_.idle_backlog();
  if (idle_backlog.since == 0 || watch_ticket_ < 0) return;
  const bool looked = last_watch_ > idle_backlog.since;  // since the oldest packet arrived
  const std::int64_t begin = looked ? last_watch_ : idle_backlog.since;
  if (now < begin + inbox_alarm_delay_) return;
  const std::uint64_t taken = idle_backlog.taken - (looked ? last_taken_ : idle_backlog.taken_then);
  last_watch_ = now;
  last_taken_ = idle_backlog.taken;
  // Only short calls in succession: more threads would only compete with the running ones.
  if (static_cast<std::int64_t>(taken) * kShortCall > now - begin) return;
  tickets_.add(watch_ticket_);
}

}  // namespace shoal
