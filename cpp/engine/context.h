// One rank's engine: its memory, its links, its two threads.  Nothing global: several live in one process.
//
// The progress thread runs what nobody waits for; the watch thread reads sockets and notices deaths.
#pragma once

#include <atomic>
#include <csignal>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/tickets.h"
#include "engine/group.h"
#include "engine/messenger.h"
#include "engine/peers.h"
#include "engine/quarantine.h"
#include "memory/arena.h"

namespace shoal {

// Where a rank can be told to die, for tests: the moments that a signal from outside would hit only by luck.
enum class Fault : int {
  kNone,
  kWriting,   // while it reduces, after the first part of its slices was written to all members
  kReduced,   // after it told the members that its slice is reduced
  kFinished,  // an operation is done here, and nobody was told so
  kGaveUp,    // a peer that stands still is marked as given up, and nobody was told so
};

class Context : public FrameSink, public std::enable_shared_from_this<Context> {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    int local_size = 1;          // ranks on this host, for deciding whether to spin
    std::size_t capacity = 0;    // bytes of address space for shared memory
    std::size_t limit = 0;       // bytes of shared memory that may be in use
    std::int64_t heartbeat = 0;  // nanoseconds without a word from a remote peer until it is lost
    bool patient = false;        // local peers that are stopped are waited for
  };
  explicit Context(Options options);
  ~Context() override;

  // Bootstrap: the descriptor and ring offset to hand to a local peer, then what came back.
  int memory_fd() const { return arena_->fd(); }
  std::size_t memory_capacity() const { return arena_->capacity(); }
  std::uint64_t make_ring() { return Peers::make_ring(*arena_); }
  // out: our ring in our arena; in: the peer's in its arena.  Takes the socket, unless it throws: BadMemory
  // if the peer's memory or ring is not what it should be, std::invalid_argument if `peer` cannot be.
  void add_local(int peer, int socket, int memory_fd, std::size_t capacity, std::uint64_t out,
                 std::uint64_t in, int pid) {
    peers_.add_local(*arena_, peer, socket, memory_fd, capacity, out, in, pid);
  }
  void add_remote(int peer, int socket) { peers_.add_remote(peer, socket); }
  void start();

  std::shared_ptr<Group> make_group(Group::Options options);
  void drop_groups();
  // Drives `op` until it is done or `until` (ns); true if done.
  bool wait(Operation& op, std::int64_t until);
  // Before a thread sleeps that waits for peers (so what ends without a sleep costs nothing): lets the watch
  // thread look at them often.
  void rouse();
  void close(std::int64_t deadline);
  // The program ends: the peers are told so of what is closed from now on.
  void program_ends() { program_ends_.store(true); }
  Departure departure() const { return program_ends_.load() ? kProgramEnded : kByChoice; }
  void disown();  // in a forked child
  // For tests: groups remembered, unread messages, frames for groups not made yet, bytes lent by the peers.
  std::tuple<std::size_t, std::size_t, std::size_t, std::uint64_t> held();
  void die_at(Fault point) { fault_.store(point, std::memory_order_relaxed); }
  void reached(Fault point) const {
    if (fault_.load(std::memory_order_relaxed) == point) [[unlikely]]
      std::raise(SIGKILL);
  }

  int rank() const { return options_.rank; }
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  bool forked() const { return forked_; }  // this is a forked child: no threads, sockets or shared memory
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  ArenaHeader& header() const { return *header_; }
  Doorbell& bell() const { return header_->doorbell; }
  Messenger& messenger() { return messenger_; }
  Peers& peers() { return peers_; }
  Quarantine& quarantine() { return quarantine_; }
  Tickets& tickets() { return tickets_; }  // of announced operations that are done; closed with the context
  Link* link(int peer) const { return peers_.link(peer); }
  const Mapping& memory(int rank) const {
    return rank == options_.rank ? arena_->mapping() : peers_.memory(rank);
  }
  void submitted(bool large);
  // Takes note of peers that have died by now, before somebody is told who has.
  void look_for_deaths();
  // All ranks that are lost by now, to this rank or to one that said so.
  std::vector<int> all_lost();
  // Whether this process was stopped, and a peer on this host has given it up: it decides nothing any more,
  // and ends nobody.
  bool given_up() const { return header_->life.given_up.load(std::memory_order_seq_cst) != 0; }
  // Ends those of `ranks` that are lost and may live; see Peers.
  std::vector<int> fence(const std::vector<int>& ranks, std::int64_t until) {
    return given_up() ? std::vector<int>() : peers_.fence(ranks, until);
  }

  Destination on_header(Link& link, const FrameHeader& header) override;
  void on_frame(Link& link, const FrameHeader& header, const Destination& destination) override;
  void on_link_lost(Link& link, LinkEnd end, const char* why) override;
  void on_sent() override { bell().ring(); }

 private:
  void progress_loop();
  void watch_loop();
  bool poll_sockets();
  // A thread in wait() while it polls the sockets; paused while it sleeps.
  struct Driving {
    Context& context;
    bool paused = false;
    explicit Driving(Context& c) : context(c) { resume(); }
    ~Driving();
    void pause();
    void resume();
  };
  void rearm();
  std::int64_t look_out(std::int64_t now, bool held, std::int64_t late);
  bool busy();
  void park_or_rearm(bool readable, std::uint64_t& seen);
  bool progress(bool& waiting);
  void check(std::int64_t now, std::int64_t& next);
  void lost(Loss loss);
  void tell_groups(const std::vector<Loss>& losses);
  void left(std::uint64_t group, int peer);
  void departed(int peer, Departure why);
  std::vector<std::shared_ptr<Group>> groups();
  std::shared_ptr<Group> find(std::uint64_t ident);  // under groups_mutex_
  void keep_early(int peer, const FrameHeader& header, std::string text);
  void refuse(Group& group, int peer, const char* flaw);
  void deliver(Group& group, int peer, const FrameHeader& header, const std::string& text);

  Options options_;
  std::shared_ptr<Arena> arena_;
  Quarantine quarantine_;
  ArenaHeader* header_;
  int spins_;              // looks at what a wait is for, before giving the core away
  std::int64_t patience_;  // how long (ns) to give it away before sleeping
  std::int64_t look_in_;   // how often (ns) the progress thread looks for small operations
  // How often (ns) the watch thread looks at local peers while operations are pending, and while none are.
  const std::int64_t look_out_, look_out_idle_;
  Peers peers_;
  Messenger messenger_;

  std::mutex groups_mutex_;
  std::vector<std::shared_ptr<Group>> groups_;
  struct Pending {  // frames for groups that do not exist here yet
    int peer;
    FrameHeader header;
    std::string text;
  };
  std::deque<Pending> early_;

  std::thread progress_thread_, watch_thread_;
  // How threads in wait() and the watch thread share the TCP sockets (waiting.cc).
  std::atomic<int> drivers_{0};           // threads in wait() that poll them
  std::atomic<std::uint64_t> drives_{0};  // how often one began to
  std::atomic<int> asleep_{0};            // threads in wait() that sleep
  std::atomic<bool> parked_{false};       // the watch thread leaves the sockets to the drivers
  std::atomic<int> telling_{0};           // threads that tell of a loss just now
  std::atomic<bool> drowsy_{false};       // the watch thread looks at local peers rarely: nothing is pending
  std::atomic<bool> stop_{false};
  std::atomic<bool> deep_{false};
  std::atomic<std::uint64_t> submissions_{0};
  std::atomic<Fault> fault_{Fault::kNone};
  bool started_ = false, forked_ = false;
  bool retired_ = false;  // the watch thread's: it has seen that this process was given up
  std::atomic<bool> closed_{false};
  std::atomic<bool> program_ends_{false};

  Tickets tickets_;
};

}  // namespace shoal
