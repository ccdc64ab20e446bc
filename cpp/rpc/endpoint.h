// The native endpoint of RPC: exchanges packets with any number of peers, which may join and leave.
//
// One thread reads all connections, keeps deadlines, and detects lost peers; it never runs Python.  A thread
// that submits a packet writes it to the socket itself if there is room.
//
// Order of locks, outermost first: peers_mutex_; a peer's `sending_`; its `calls_mutex_`; those of its link;
// all others, which are held briefly.  The endpoint's thread never takes peers_mutex_ from within a link.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/buffer_pool.h"
#include "common/heartbeat.h"
#include "common/tickets.h"
#include "rpc/budget.h"
#include "rpc/inbox.h"
#include "rpc/packet.h"
#include "rpc/peer.h"
#include "rpc/shared_buffers.h"

namespace shoal {

class RpcEndpoint final : public FrameSink {
 public:
  struct Options {
    std::uint64_t budget = 0;    // maximum bytes of large parts that were received and not yet taken
    std::int64_t heartbeat = 0;  // ns
  };

  explicit RpcEndpoint(Options options);
  ~RpcEndpoint() override;

  // Whether this is a child that was forked after the endpoint was made: then nothing here may be used.
  bool foreign() const;
  bool closed() const { return closing_.load(std::memory_order_acquire); }

  // Whether there is memory to lend to peers; a new descriptor of it, or -1 (throws std::system_error).
  bool lends() { return lender() != nullptr; }
  int memory();
  // Takes the descriptors `fd` and `memory` (of the memory that the peer lends, or -1).
  // Throws std::system_error, BadMemory and OutOfMemory.
  int attach(int fd, int pid, std::int64_t ticket, int memory = -1);
  void drop(int peer, std::string why);
  std::optional<std::string> lost(int peer);

  bool has_room(int peer, std::uint64_t bytes) { return await_room(peer, bytes, 0); }
  // Waits until `bytes` may be queued for the peer, at most until `until` (ns); see Peer::await_room.
  bool await_room(int peer, std::uint64_t bytes, std::int64_t until, bool stage = false);
  void unstage(int peer, std::uint64_t bytes);
  // `no_room`: await_room timed out, so the call times out.
  CallPtr request(int peer, const PacketContents& contents, std::int64_t deadline, bool no_room,
                  std::string shown);
  bool send(int peer, const PacketContents& contents);
  // A call, or a post if `one_way`, with contents that come later (`fill`); `no_room` as for `request`.
  CallPtr hold(int peer, std::uint32_t mailbox, std::int64_t deadline, bool no_room, bool one_way,
               std::string shown);
  // Sends a held packet; false if it was cancelled meanwhile.
  bool fill(Call& call, const PacketContents& contents);
  // Cancels a held packet, because its contents will never come.
  void abandon_held(const CallPtr& call, std::string why);
  bool reply(Packet& packet, const PacketContents& contents);
  // The call will not be answered.
  void abandon(Packet& packet);
  bool cancel(const CallPtr& call);

  Inbox& inbox() { return inbox_; }
  Tickets& tickets() { return tickets_; }
  void watch_inbox(std::int64_t ticket, std::int64_t patience);

  struct Stats {
    std::size_t peers, calls, packets, handled;
    std::uint64_t made, queued, granted, lent, kept;
  };
  Stats stats();
  // The calls without a reply.
  std::vector<CallPtr> pending();
  // The received calls that are not answered: the peer, its number for the call, and the state.
  struct Handled {
    int peer;
    std::uint64_t number;
    ReceivedCall::Status status;
  };
  std::vector<Handled> handled();
  void disconnect(int peer);
  void pause_heartbeats(bool silent) { silent_ = silent; }
  // Sends queued packets and closes; returns the peers that did not take all of them before the deadline.
  std::vector<int> close(std::int64_t deadline);

  // For the assembler of a peer's packets: a call or a post has arrived completely.  In the endpoint's
  // thread.
  void packet_arrived(PacketPtr packet);
  // A call has ended; the caller of this has claimed it.
  void ended(Peer& peer, const CallPtr& call, CallEnd how, std::string text, PacketPtr reply);
  Budget& budget() { return *budget_; }
  BufferPool& buffers() { return *buffers_; }
  // Memory for a part to be sent: lent without a copy to a peer of this host.  Null if out of memory.
  std::shared_ptr<std::byte> part_to_send(std::uint64_t bytes);
  // Releases memory that a forked child should not inherit.
  void before_fork() { buffers_->clear(); }
  // In a forked child: closes inherited descriptors.
  void disown();
  std::mutex& peers_mutex() { return peers_mutex_; }

 private:
  // Flags in the data of an epoll event, besides the peer's id.
  static constexpr std::uint64_t kWakeup = 1ULL << 63, kPidfd = 1ULL << 62;

  // FrameSink; called in the endpoint's thread.
  const PacketState* packets(Link& link) override;
  Destination on_header(Link& link, const FrameHeader& header) override;
  void on_frame(Link& link, const FrameHeader& header, const Destination& destination) override;
  void on_link_lost(Link& link, LinkEnd end, const char* why) override;
  void on_sent() override {}
  void run();
  void serve(Peer& peer, std::uint32_t events);
  void end_of(Peer& peer, const char* why);
  std::int64_t next_wake();
  void wake();
  std::shared_ptr<Peer> find(int peer);
  template <class Submit>
  CallPtr begin(int peer, std::int64_t deadline, bool no_room, std::string shown, Submit submit);
  std::vector<std::shared_ptr<Peer>> all_peers();
  void lose(Peer& peer, std::string why);
  void expire(std::int64_t now);
  void overdue(Peer& peer, const CallPtr& call, std::string known);
  void on_status_report(const FrameHeader& header);
  void set_deadline(const CallPtr& call, std::int64_t at);
  void forget_deadline(const Call& call);
  void cancelled_by_peer(std::uint64_t call);
  std::string status(std::uint64_t call);
  void beat(std::int64_t now);
  void check_inbox(std::int64_t now);
  std::string why_lost(int peer);
  std::shared_ptr<SharedBufferPool> lender();
  void release_peer_buffers(int lost_peers, bool ended);
  void tidy(std::int64_t now);

  const Options options_;
  const unsigned generation_;
  int epoll_ = -1, wakeup_ = -1;
  std::atomic<bool> closing_{false}, stop_{false}, silent_{false};
  std::mutex close_mutex_;
  bool closed_ = false;
  Inbox inbox_;
  Tickets tickets_;
  std::shared_ptr<Budget> budget_;
  std::shared_ptr<BufferPool> buffers_;
  std::atomic<bool> room_{false};  // the budget has room again

  std::mutex peers_mutex_;
  std::unordered_map<int, std::shared_ptr<Peer>> peers_;
  int last_peer_ = 0;
  std::unordered_map<int, std::string> dropped_;  // reasons for peers that are being dropped
  std::map<int, std::string> losses_;
  std::uint64_t made_to_lost_ = 0;  // calls of this process to peers that are lost
  std::map<int, int> departed_;     // pidfds of lost peers that may still use lent blocks
  PeerMemories memories_;
  std::shared_ptr<SharedBufferPool> lender_;  // until the endpoint is closed

  std::mutex deadlines_mutex_;
  std::map<std::pair<std::int64_t, std::uint64_t>, CallPtr> deadlines_;
  std::int64_t sleeps_until_ = 0;
  std::atomic<std::uint64_t> calls_{0};

  std::atomic<std::int64_t> watch_ticket_{-1}, inbox_alarm_delay_{0};

  // Used by the endpoint's thread only.
  std::thread* thread_ = nullptr;  // a pointer: a forked child must not join it
  Peer* reading_ = nullptr;        // the peer whose link is being read
  std::string end_;                // why that link has ended
  std::string text_;               // of the current control frame
  Heartbeat heartbeat_;
  std::int64_t last_watch_ = 0;
  std::uint64_t last_taken_ = 0;  // number of packets taken at last_watch_
};

}  // namespace shoal
