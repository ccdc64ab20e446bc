// One rank's engine: its memory, links and threads.  No global state but a count: a process may have several.
//
// The progress threads run operations without a waiter; the watch thread reads sockets and detects losses.
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

#include "common/buffer_pool.h"
#include "common/tickets.h"
#include "engine/group.h"
#include "engine/messenger.h"
#include "engine/mover.h"
#include "engine/peers.h"
#include "engine/quarantine.h"
#include "engine/status_page.h"
#include "engine/trace.h"
#include "shm/arena.h"

namespace shoal {

// Points at which a rank kills itself, for tests: a signal from outside would rarely hit them.
enum class Fault : int {
  kNone,
  kWriting,   // in a reduction, after the first part of its slices was written to all members
  kReduced,   // after it announced that its slice is reduced
  kFinished,  // after an operation has completed, before any peer is notified
  kEvicted,   // after a stopped peer was marked as evicted, before any peer is notified
};

class Context : public FrameSink, public std::enable_shared_from_this<Context> {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    int local_size = 1;          // ranks on this host, to decide whether to spin
    std::size_t capacity = 0;    // bytes of address space for shared memory
    std::size_t limit = 0;       // maximum bytes of shared memory in use
    std::int64_t heartbeat = 0;  // nanoseconds of silence after which a remote peer is lost
    bool patient = false;        // wait for local peers that are stopped
    std::string job = {};        // its name, for the status page
    // If this connects only some ranks of a world once more: the context of the world, whose status page and
    // totals include the groups of this one; and the ranks of this one in the world.
    std::shared_ptr<Context> world = {};
    std::vector<int> world_ranks = {};
    int progress_threads = 1;
  };
  explicit Context(Options options);
  ~Context() override;

  // Bootstrap: the descriptor and ring offset to send to a local peer; add_local takes the peer's.
  int memory_fd() const { return arena_->fd(); }
  std::size_t memory_capacity() const { return arena_->capacity(); }
  std::uint64_t make_ring() { return Peers::make_ring(*arena_); }
  // out: this rank's ring in its arena; in: the peer's ring in the peer's arena.  Takes the socket, unless it
  // throws BadMemory (invalid memory or ring of the peer) or std::invalid_argument (invalid `peer`).
  void add_local(int peer, int socket, int memory_fd, std::size_t capacity, std::uint64_t out,
                 std::uint64_t in, int pid) {
    peers_.add_local(*arena_, peer, socket, memory_fd, capacity, out, in, pid);
    if (status_->leader == 0) status_->leader = status_->pid;
    if (peer < lowest_local_) {
      lowest_local_ = peer;
      status_->leader = pid;
    }
  }
  void add_remote(int peer, int socket) { peers_.add_remote(peer, socket); }
  void start();

  std::shared_ptr<Group> make_group(Group::Options options);
  void drop_groups();
  // Drives `op` until it is done or `until` (ns); true if it is.  kMet: or until all members have met.
  enum class Stage { kMet, kDone };
  bool wait(Operation& op, std::int64_t until, Stage stage = Stage::kDone);
  // Makes the watch thread check peers often.  Called before a thread sleeps to wait for peers, so that waits
  // without a sleep do not pay for it.
  void wake_monitor();
  void close(std::int64_t deadline);
  // The program ends: closing is reported to the peers with this reason from now on.
  void program_ends() { program_ends_.store(true); }
  Departure departure() const { return program_ends_.load() ? kProgramEnded : kByChoice; }
  void disown();  // in a forked child
  // For tests: known groups, unread messages, frames for groups not made yet, bytes lent by the peers.
  std::tuple<std::size_t, std::size_t, std::size_t, std::uint64_t> held();
  // The counters of all groups so far, with those of contexts whose world this is.
  StatisticsValues totals();
  void die_at(Fault point) { fault_.store(point, std::memory_order_relaxed); }
  void reached(Fault point) const {
    if (fault_.load(std::memory_order_relaxed) == point) [[unlikely]]
      std::raise(SIGKILL);
  }

  int rank() const { return options_.rank; }
  int world_rank(int rank) const { return options_.world == nullptr ? rank : options_.world_ranks[rank]; }
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  bool forked() const { return forked_; }  // a forked child has no threads, sockets or shared memory
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  ArenaHeader& header() const { return *header_; }
  Doorbell& bell() const { return header_->doorbell; }
  Messenger& messenger() { return messenger_; }
  Peers& peers() { return peers_; }
  Quarantine& quarantine() { return quarantine_; }
  Trace& trace() { return trace_; }
  Tickets& tickets() { return tickets_; }  // of announced operations that completed; closed with the context
  Link* link(int peer) const { return peers_.link(peer); }
  const Mapping& memory(int rank) const {
    return rank == options_.rank ? arena_->mapping() : peers_.memory(rank);
  }
  BufferPool& buffers() { return *buffers_; }  // memory of operations
  void submitted(bool large);
  // A thread asks whether an operation is done, and does not run it.
  void polled_by_caller();
  // Calls the progress() of the library from now on.
  void use(std::shared_ptr<MovingLibrary> library);
  // Records peers that have died, before losses are reported.
  void look_for_deaths();
  // All ranks that this rank, or one that reported it, has lost.
  std::vector<int> all_lost();
  // Whether this process was stopped and then evicted by a peer on its host.  It must then neither decide
  // anything nor end other processes.
  bool evicted() const { return header_->life.evicted.load(std::memory_order_seq_cst) != 0; }
  // Kills those of `ranks` that are lost and may still run; see Peers.
  std::vector<int> fence(const std::vector<int>& ranks, std::int64_t until) {
    return evicted() ? std::vector<int>() : peers_.fence(ranks, until);
  }

  Destination on_header(Link& link, const FrameHeader& header) override;
  void on_frame(Link& link, const FrameHeader& header, const Destination& destination) override;
  void on_link_lost(Link& link, LinkEnd end, const char* why) override;
  void on_sent() override { bell().ring(); }

 private:
  void progress_loop(bool first);
  void watch_loop();
  bool poll_rings();
  // Publishes the core of this thread for waiting peers; returns it.
  int publish_core();
  bool poll_sockets();
  // A thread in wait() that polls the sockets; paused while it sleeps.
  struct SocketPolling {
    Context& context;
    bool paused = false;
    explicit SocketPolling(Context& c) : context(c) { resume(); }
    ~SocketPolling();
    void pause();
    void resume();
  };
  void rearm();
  void write_status(std::int64_t now);
  void keep_counters(Group& group);
  std::vector<std::shared_ptr<Group>> counted_groups(StatisticsValues& ended);
  void end_part(Context& part);
  RemoteStatus remote_status(std::int64_t now);
  void keep_remote_status(int peer, const std::byte* report, std::size_t bytes);
  std::int64_t check_local_peers(std::int64_t now, bool held, std::int64_t late);
  bool busy();
  void release_or_reclaim_sockets(bool readable, std::uint64_t& seen);
  void nap(Operation& op, std::int64_t nanoseconds);
  bool progress(Remaining& remaining);
  void check(std::int64_t now, std::int64_t& next);
  void lost(Loss loss);
  void report_to_groups(const std::vector<Loss>& losses);
  void left(std::uint64_t group, int peer);
  void on_peer_left(int peer, Departure why);
  std::vector<std::shared_ptr<Group>> groups();
  std::shared_ptr<MovingLibrary> moving_library();
  std::shared_ptr<Group> find(std::uint64_t ident);  // requires groups_mutex_
  void keep_early(int peer, const FrameHeader& header, std::string text);
  void refuse(Group& group, int peer, const char* flaw);
  void deliver(Group& group, int peer, const FrameHeader& header, const std::string& text);

  // Contexts that the process has made, without those that are parts of a world.  A forked child continues
  // with its parent's number.
  static inline std::atomic<std::uint64_t> worlds_made_{0};

  Options options_;
  std::shared_ptr<Arena> arena_;
  std::shared_ptr<BufferPool> buffers_;
  Quarantine quarantine_;
  ArenaHeader* header_;
  StatusPage* status_;
  int lowest_local_;                // the lowest rank that shares memory, this one included
  StatusRemote* remote_ = nullptr;  // by rank; null: all ranks are on this host
  int spins_;                       // checks of a wait's condition before yielding the core
  std::int64_t yield_time_;         // nanoseconds of yielding before sleeping
  std::int64_t progress_interval_;  // nanoseconds between a progress thread's checks for small operations
  // Nanoseconds between the watch thread's checks of local peers, while operations are pending and otherwise.
  const std::int64_t peer_check_interval_, idle_peer_check_interval_;
  Peers peers_;
  Messenger messenger_;

  std::mutex groups_mutex_;
  std::vector<std::shared_ptr<Group>> groups_;
  std::shared_ptr<MovingLibrary> moving_library_;
  StatisticsValues ended_;  // of dropped groups and closed parts; the late members are not sorted
  std::vector<std::weak_ptr<Context>> parts_;  // the open contexts whose world this is
  struct Pending {                             // frames for groups that do not exist here yet
    int peer;
    FrameHeader header;
    std::string text;
  };
  std::deque<Pending> early_;

  std::vector<std::thread> progress_threads_;
  std::thread watch_thread_;
  // State with which threads in wait() and the watch thread share the TCP sockets (threads.cc).
  std::atomic<int> polling_waiters_{0};          // threads in wait() that poll them
  std::atomic<std::uint64_t> poll_sessions_{0};  // number of times a thread began to
  std::atomic<int> asleep_{0};                   // threads in wait() that sleep
  std::atomic<bool> sockets_released_{false};    // the watch thread leaves the sockets to them
  std::atomic<int> reporting_losses_{0};         // threads that are reporting a loss
  std::atomic<bool> monitor_idle_{false};  // nothing is pending: the watch thread checks local peers rarely
  std::atomic<bool> stop_{false};
  std::atomic<int> deep_{0};         // progress threads that nothing but a ring wakes up soon
  std::atomic<int> inattentive_{0};  // progress threads that frames do not wake
  std::atomic<std::uint64_t> submissions_{0};
  std::atomic<Fault> fault_{Fault::kNone};
  bool started_ = false, forked_ = false;
  bool retired_ = false;  // the watch thread has seen that this process was evicted
  std::atomic<bool> closed_{false};
  std::atomic<bool> program_ends_{false};

  Tickets tickets_;
  Trace trace_;
};

}  // namespace shoal
