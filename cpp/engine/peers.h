// The other ranks of the job: the connections to them, and their states.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/heartbeat.h"
#include "engine/status_page.h"
#include "net/link.h"
#include "net/ring_link.h"
#include "net/socket_link.h"
#include "shm/arena.h"

namespace shoal {

// The reason of the loss of a stopped peer.
inline constexpr const char* kStoppedText = "its process is stopped";

// A peer that died, or that can no longer be reached.
struct Loss {
  int peer;  // global rank
  std::string why;
  ErrorCode code = ErrorCode::kPeerLost;
  bool dead = false;  // its process has certainly ended
};

class Peers {
 public:
  enum State : int { kAlive, kDeparted, kEnded, kLost };  // kEnded: left because its program ended

  // heartbeat: silence (ns) after which a remote peer is lost; look: maximum time (ns) between calls of
  // stopped().
  Peers(FrameSink& sink, int rank, int size, std::int64_t heartbeat, std::int64_t look);
  ~Peers();

  // See Context.
  static std::uint64_t make_ring(Arena& arena);
  void add_local(Arena& arena, int rank, int socket, int memory_fd, std::size_t capacity, std::uint64_t out,
                 std::uint64_t in, int pid);
  void add_remote(int rank, int socket);
  void start(std::int64_t now);

  Link* link(int rank) const { return at(rank).link.get(); }
  const Mapping& memory(int rank) const { return *at(rank).memory; }  // local peers only
  State state(int rank) const { return static_cast<State>(at(rank).state.load()); }
  bool dead(int rank) const { return at(rank).dead.load(); }
  bool remote() const { return remote_; }              // whether there are peers on other hosts
  bool local() const { return !ring_peers_.empty(); }  // whether there are peers on this host
  bool remote(int rank) const { return at(rank).tcp != nullptr; }
  // Buffer for the payload of an arriving control frame.
  std::vector<std::byte>& text(int rank) { return at(rank).text; }

  // Reads and writes as much as possible; true if anything moved.
  bool poll_rings();
  // Reads everything that local peers have written so far, also what another thread is reading.
  void read_rings();
  bool poll_sockets();
  // Whether a local peer was last on this core.
  bool any_on_core(int core) const;

  // For the watch thread: waits for an event of a peer, at most `milliseconds`.
  struct Events {
    bool readable = false;  // the sockets are readable, if they are listened to
    bool woken = false;     // by wake()
    bool held = false;      // this process was stopped meanwhile
    std::vector<Loss> losses;
    std::vector<int> ended;  // local peers with ended processes and unmapped memory
  };
  Events wait_for_events(int milliseconds);
  void wake();
  void listen(bool sockets);
  std::int64_t period() const { return heartbeat_.period(); }  // of heartbeats, in nanoseconds
  // Sends due heartbeats with this rank's report; returns the remote peers that were silent for too long.
  std::vector<Loss> heartbeats(std::int64_t now, const std::function<RemoteStatus(std::int64_t)>& report);
  // The local peers whose processes a signal has stopped for long, and those that others have evicted.  held:
  // this process was stopped since the last call; late: delay of this call, in nanoseconds.
  std::vector<Loss> stopped(std::int64_t now, bool held, std::int64_t late);
  // Marks a local peer as evicted, for all processes of the host and for itself; whether it is marked.
  void mark_evicted(int rank) { life(at(rank)).evicted.store(1, std::memory_order_seq_cst); }
  bool is_evicted(int rank) const {
    return at(rank).memory && life(at(rank)).evicted.load(std::memory_order_seq_cst) != 0;
  }
  // Text that this process recently did not run, because it was stopped or starved; empty if it ran.
  std::string absence() const;

  // Marks a peer as lost; false if it had left before.
  bool mark_lost(Loss& loss);
  bool mark_left(int rank, Departure why);
  void lost_to_others(int rank) { at(rank).lost_to_others.store(true); }
  // Whether connections to remote peers have ended, and another thread is about to report it.
  bool breaking();
  // The local peers whose death was not known.  Costs one load per peer.
  std::vector<Loss> died() const;
  // Marks the local peers whose processes have died or ended, if not known before; returns them.
  std::vector<Loss> ended();
  // Kills those of the local peers `ranks` that may still run and that this rank has lost or a signal has
  // stopped: they could write to memory that others reuse.  Returns those that are still running at `until`.
  std::vector<int> fence(const std::vector<int>& ranks, std::int64_t until);
  // All ranks that this rank, or one that reported it, has lost.
  std::vector<int> all_lost() const;

  void disconnect(int rank);                                // cuts the connection to a peer
  void disconnect_remote();                                 // cuts the connections to other hosts
  void pause_heartbeats(bool silent) { silent_ = silent; }  // fault injection: stop sending heartbeats
  std::uint64_t lent() const;                               // bytes lent by all peers

  // Notifies all peers that this rank leaves, after everything that was sent.
  void say_goodbye(Departure why, std::int64_t deadline);
  void close();
  void disown();  // in a forked child

 private:
  struct Peer {
    std::unique_ptr<Link> link;
    RingLink* ring = nullptr;
    SocketLink* tcp = nullptr;
    std::unique_ptr<Mapping> memory;
    int socket = -1;                     // local peers: closes when the peer ends
    int pidfd = -1;                      // readable when the peer has ended and its memory is unmapped
    std::int64_t beat = 0, beat_at = 0;  // the last beat seen, and the time
    std::int64_t grace_until = 0;        // unless a beat comes before
    std::int64_t stopped_since = 0;      // all checks since then found it stopped; 0: the last one did not
    std::atomic<int> state{kAlive};
    std::atomic<bool> lost_to_others{false};
    std::atomic<bool> dead{false};  // its process has certainly ended
    std::vector<std::byte> text;
  };
  static ProcessLiveness& life(const Peer& peer) { return peer.memory->at<ArenaHeader>(0)->life; }
  Peer& at(int rank) { return peers_[rank]; }
  const Peer& at(int rank) const { return peers_[rank]; }
  int size() const { return static_cast<int>(peers_.size()); }
  Peer& new_peer(int rank);
  void close_descriptors();

  FrameSink& sink_;
  const int rank_;
  const std::int64_t look_;
  Heartbeat heartbeat_;  // of remote peers
  Heartbeat beats_;      // of local peers
  std::vector<Peer> peers_;
  std::vector<int> ring_peers_;
  std::mutex descriptors_mutex_;  // while held, the peers' descriptors and `wakeup_` are not closed
  int epoll_ = -1;
  // A separate epoll for the TCP sockets, polled by threads in wait() or by the watch thread (see listen).
  int sockets_ = -1;
  int wakeup_ = -1;
  bool remote_ = false;
  std::atomic<bool> silent_{false};
};

}  // namespace shoal
