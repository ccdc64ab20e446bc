// The other ranks of the job: the connections to them, and which of them are alive.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/heartbeat.h"
#include "memory/arena.h"
#include "transport/link.h"
#include "transport/ring_link.h"
#include "transport/socket_link.h"

namespace shoal {

// Why a peer is lost that stands still.
inline constexpr const char* kStoppedText = "its process is stopped";

// A peer that died, or to which nothing leads any more.
struct Loss {
  int peer;  // global rank
  std::string why;
  ErrorCode code = ErrorCode::kPeerLost;
  bool dead = false;  // its process has certainly ended
};

class Peers {
 public:
  enum State : int { kAlive, kDeparted, kEnded, kLost };  // kEnded: departed with its program

  // heartbeat: nanoseconds without a word from a remote peer until it is lost; look: nanoseconds between two
  // calls of stopped(), at most.
  Peers(FrameSink& sink, int rank, int size, std::int64_t heartbeat, std::int64_t look);
  ~Peers();

  // See Context.
  static std::uint64_t make_ring(Arena& arena);
  void add_local(Arena& arena, int rank, int socket, int memory_fd, std::size_t capacity, std::uint64_t out,
                 std::uint64_t in, int pid);
  void add_remote(int rank, int socket);
  void start(std::int64_t now);

  Link* link(int rank) const { return at(rank).link.get(); }
  const Mapping& memory(int rank) const { return *at(rank).memory; }  // of a local one
  State state(int rank) const { return static_cast<State>(at(rank).state.load()); }
  bool dead(int rank) const { return at(rank).dead.load(); }
  bool remote() const { return remote_; }              // some are on other hosts
  bool local() const { return !ring_peers_.empty(); }  // some are on this one
  bool remote(int rank) const { return at(rank).tcp != nullptr; }
  // Room for the payload of a control frame on its way in.
  std::vector<std::byte>& text(int rank) { return at(rank).text; }

  // Reads and writes what is there, and what there is room for; true if anything moved.
  bool poll_rings();
  // Reads all that local peers have written by now, also what another thread is reading.
  void read_rings();
  bool poll_sockets();

  // For the thread that watches: waits until something is told of a peer, or so many milliseconds.
  struct News {
    bool readable = false;  // sockets, if they are listened to
    bool woken = false;     // by wake()
    bool held = false;      // this process was stopped meanwhile
    std::vector<Loss> losses;
    std::vector<int> ended;  // local peers whose processes have ended, and whose memory is unmapped
  };
  News wait_for_news(int milliseconds);
  void wake();
  void listen(bool sockets);
  std::int64_t period() const { return heartbeat_.period(); }  // of heartbeats, nanoseconds
  // Sends what is due, and tells whom nothing was heard of for too long.
  std::vector<Loss> heartbeats(std::int64_t now);
  // The local peers whose processes a signal has stopped for long, and those that others have given up. held:
  // this one was stopped since the last call; late: how late this call is, in nanoseconds.
  std::vector<Loss> stopped(std::int64_t now, bool held, std::int64_t late);
  // Marks a local peer as given up, for all on the host and for itself; whether one is marked.
  void give_up(int rank) { life(at(rank)).given_up.store(1, std::memory_order_seq_cst); }
  bool given_up(int rank) const {
    return at(rank).memory && life(at(rank)).given_up.load(std::memory_order_seq_cst) != 0;
  }
  // Says in words that this process did not run for a while just now: it was stopped, or starved.
  std::string absence() const;

  // Marks a peer as lost; false if it had left before.
  bool mark_lost(Loss& loss);
  bool mark_departed(int rank, Departure why);
  void lost_to_others(int rank) { at(rank).lost_to_others.store(true); }
  // Whether connections to remote peers have ended, and another thread is about to tell so.
  bool breaking();
  // The local peers of which nobody knew that their processes have died.  Costs a load a peer.
  std::vector<Loss> died() const;
  // Marks the local peers whose processes have died or ended, of which nobody knew.
  std::vector<Loss> ended();
  // Ends those of the local peers `ranks` that this rank has lost, or a signal has stopped, and that may
  // live: what they still write would hit memory that others use again.  Returns those that have not ended at
  // `until`, or cannot be ended.
  std::vector<int> fence(const std::vector<int>& ranks, std::int64_t until);
  // All that are lost by now, to this rank or to one that said so.
  std::vector<int> all_lost() const;

  void sever(int rank);                         // cuts the connection
  void sever_remote();                          // those to other hosts
  void hush(bool silent) { silent_ = silent; }  // fault injection: stop sending heartbeats
  std::uint64_t lent() const;                   // bytes lent by all

  // Tells all that this rank leaves, and sees to it that they hear all that was sent.
  void say_goodbye(Departure why, std::int64_t deadline);
  void close();
  void disown();  // in a forked child

 private:
  struct Peer {
    std::unique_ptr<Link> link;
    RingLink* ring = nullptr;
    SocketLink* tcp = nullptr;
    std::unique_ptr<Mapping> memory;
    int socket = -1;                     // local: its end means the peer's
    int pidfd = -1;                      // its end means that the peer's memory is unmapped
    std::int64_t beat = 0, beat_at = 0;  // the last one that was seen, and when
    std::int64_t excused_until = 0;      // if no beat comes before
    std::int64_t stopped_since = 0;      // each look since then found it stopped; 0: the last one did not
    std::atomic<int> state{kAlive};
    std::atomic<bool> lost_to_others{false};
    std::atomic<bool> dead{false};  // certainly
    std::vector<std::byte> text;
  };
  static Life& life(const Peer& peer) { return peer.memory->at<ArenaHeader>(0)->life; }
  Peer& at(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const Peer& at(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(peers_.size()); }
  Peer& new_peer(int rank);
  void close_descriptors();

  FrameSink& sink_;
  const int rank_;
  const std::int64_t look_;
  Heartbeat heartbeat_;  // of remote peers
  Heartbeat beats_;      // of local ones
  std::vector<Peer> peers_;
  std::vector<int> ring_peers_;
  std::mutex descriptors_mutex_;  // those of the peers, and `wakeup_`, are not closed under it
  int epoll_ = -1;
  // The TCP sockets, watched through an epoll of their own: a thread that waits for an operation polls it,
  // and one call hands it back to the thread that watches.
  int sockets_ = -1;
  int wakeup_ = -1;
  bool remote_ = false;
  std::atomic<bool> silent_{false};
};

}  // namespace shoal
