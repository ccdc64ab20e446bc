// One peer of an endpoint: its connection, the packets queued for it, the calls made to it and received from
// it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "net/socket_link.h"
#include "rpc/packet.h"
#include "rpc/packet_assembler.h"

namespace shoal {

class RpcEndpoint;

class Peer : public std::enable_shared_from_this<Peer> {
 public:
  Peer(RpcEndpoint& endpoint, int id, int fd, int epoll, std::int64_t ticket);

  const int id;
  const std::int64_t ticket;
  SocketLink link;
  PacketAssembler arrivals;  // the endpoint's thread only
  int pidfd = -1;
  std::shared_ptr<PeerBuffer> borrowed;      // the memory that the peer shares
  std::shared_ptr<SharedBufferPool> lender;  // the memory lent to the peer
  bool local = false;  // on this host: its process is watched, so no heartbeats are needed

  // -- sending ------------------------------------------------------------------------------------

  // Waits until the queue has room for `bytes`, at most until `until` (ns); true if it has, or the peer is
  // lost.  With `stage`, reserves this room until `unstage`, for bytes that are being copied to host memory.
  bool await_room(std::uint64_t bytes, std::int64_t until, bool stage = false);
  void unstage(std::uint64_t bytes);
  OutgoingPacket compose(const PacketContents& contents) const {
    return shoal::compose(contents, lender.get(), id);
  }
  // Sends a call (a post, if `call` is null), or queues it; false if the peer is lost.
  bool submit(OutgoingPacket outgoing, const CallPtr& call);
  // Reserves the place of a packet with contents that come later (`fill`); false if the peer is lost.  Later
  // packets to the same ordered mailbox wait for it.  `one_way`: a post, which `call` represents.
  bool hold(std::uint32_t mailbox, const CallPtr& call, bool one_way);
  // Sends a held packet; false if it was cancelled meanwhile.
  bool fill(Call& call, OutgoingPacket outgoing);
  bool reply(OutgoingPacket outgoing, std::uint64_t number);
  // The peer returned a part of its window.
  void credited(std::uint64_t bytes);
  void control(FrameType type, std::uint64_t call, std::uint16_t code = 0, const std::string& text = "");
  // Cancels unsent messages of a call that has ended.
  void stop_sending(Call& call);
  bool all_sent();
  std::uint64_t queued();
  // Why the call is still in the queue, such as "takes nothing for 5 s, 812 packets queued"; "" if it is not.
  std::string unsent(const Call& call, std::int64_t now);
  // The same for a call for which the queue had no room.
  std::string queue_full_reason(std::int64_t now);

  // -- calls --------------------------------------------------------------------------------------

  // The number of this process's last call.
  std::uint64_t made() const { return made_.load(std::memory_order_acquire); }
  CallPtr pending(std::uint64_t number);
  void forget(const Call& call);
  std::vector<CallPtr> all_pending();
  void handling(std::uint64_t number, const std::shared_ptr<ReceivedCall>& handling, const PacketPtr& packet);
  std::pair<std::shared_ptr<ReceivedCall>, PacketPtr> handled(std::uint64_t number);
  void answered(std::uint64_t number);
  std::size_t handled();
  std::vector<std::pair<std::uint64_t, std::shared_ptr<ReceivedCall>>> all_handled();

  // Ends sending; returns the calls pending and handled until now.
  void lose(std::vector<CallPtr>& pending, std::vector<std::shared_ptr<ReceivedCall>>& handled);

 private:
  struct Queued {
    OutgoingPacket outgoing;
    CallPtr call;
    std::uint32_t mailbox = 0;
    bool held = false;  // its contents have yet to come
  };
  struct CallBeingServed {
    std::shared_ptr<ReceivedCall> handling;
    std::weak_ptr<Packet> packet;
  };
  std::string backlog(std::int64_t now) const;
  bool fits(const OutgoingPacket& outgoing);
  bool may_pass(std::uint32_t mailbox) const;
  void pump();
  void remove_queued(std::map<std::uint64_t, Queued>::iterator queued);
  bool register_call(const CallPtr& call);
  bool renumber(const CallPtr& call);
  void transmit(OutgoingPacket& outgoing, const CallPtr& call);

  std::mutex sending_;  // held for every message to the peer, so that parts follow their packet
  std::condition_variable room_;
  std::map<std::uint64_t, Queued> outbox_;            // in order of submission
  std::unordered_map<std::uint32_t, int> mailboxes_;  // ordered mailboxes with packets in the outbox
  std::size_t held_ = 0;                              // number of held packets in the outbox
  std::uint64_t submitted_ = 0;
  std::uint64_t last_sent_ = 0;            // number of the last call sent
  std::uint64_t queued_ = 0, staged_ = 0;  // bytes
  std::int64_t blocked_since_ = 0;         // when the peer last took a packet, or the outbox got its first

  std::mutex calls_mutex_;
  std::atomic<bool> lost_{false};
  std::atomic<std::uint64_t> made_{0};
  std::unordered_map<std::uint64_t, CallPtr> pending_;
  std::unordered_map<std::uint64_t, CallBeingServed> handled_;
};

}  // namespace shoal
