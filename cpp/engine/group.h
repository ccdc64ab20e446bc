// A group in the core: its members, lanes and operations, and its failure.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/agreements.h"
#include "engine/call_comparison.h"
#include "engine/host_members.h"
#include "engine/lanes.h"
#include "engine/operation.h"
#include "engine/peers.h"

namespace shoal {

class Context;
class Mover;

// The effect of a failure between two members: it ends the whole group, or only the messages between them.  A
// pairwise group has no collectives: after a failure on one rank, the ranks would be at different operations.
enum class Scope { kAll, kPair };

class Group : public std::enable_shared_from_this<Group> {
 public:
  struct Options {
    std::uint64_t ident = 0;
    std::string name;
    int rank = 0;
    std::vector<int> ranks;  // global
    std::vector<int> hosts;  // of each member
    int lanes = 1;
    Scope scope = Scope::kAll;
    Agreements::Rules agreements = {};
    bool moved = false;  // a mover moves the data of its numbered collectives
    Algorithm algorithm = Algorithm::kAuto;
  };
  Group(std::shared_ptr<Context> context, Options options);
  ~Group();

  Context& context() const { return *context_; }
  std::uint64_t ident() const { return options_.ident; }
  const std::string& name() const { return options_.name; }
  int rank() const { return options_.rank; }
  int size() const { return static_cast<int>(options_.ranks.size()); }
  int global(int rank) const { return options_.ranks[rank]; }
  int rank_of(int global) const;
  int world_rank(int rank) const;                                        // on the status page
  const std::vector<int>& ranks() const { return options_.ranks; }       // global, of the members
  const std::vector<std::vector<int>>& hosts() const { return hosts_; }  // members of each host, ascending
  int host() const { return host_; }                                     // index of this member's host
  int lane_count() const { return options_.lanes; }
  Algorithm algorithm() const { return options_.algorithm; }
  bool pairwise() const { return options_.scope == Scope::kPair; }
  HostMembers* team() const { return team_.get(); }  // null if alone on this host
  Link* link(int rank) const;
  Lanes& lanes() { return lanes_; }
  CallComparison& inquiry() { return inquiry_; }
  Agreements& agreements() { return agreements_; }

  // Whether a mover moves the data of numbered collectives; the mover, null until it is there.
  bool moved() const { return options_.moved; }
  Mover* mover() const { return mover_.load(std::memory_order_acquire); }
  void set_mover(std::shared_ptr<Mover> mover);  // once
  // Whether an operation failed while the mover used its memory.
  bool abandoned() const { return abandoned_.load(std::memory_order_acquire); }

  OperationPtr submit(Request request);
  // Checks deadlines and inquiries; lowers `next` to the time of the next check.
  void check(std::int64_t now, std::int64_t& next);
  std::shared_ptr<Block> allocate(std::size_t bytes);

  // Creates a frame of this member; sends a frame to one or all members.
  FrameHeader frame(FrameType type) const;
  void send_to(int rank, const FrameHeader& header, const std::string& text = {});
  void send_to_all(const FrameHeader& header, const std::string& text = {});

  bool broken() const { return broken_.load(std::memory_order_acquire); }
  std::optional<Error> failure();
  // If the error is about lost members, adds all members that are lost by now.
  Error with_all_lost(Error error);
  // Ends the group with `error`, once; notifies the peers if `announce`.
  void fail(Error error, bool announce);
  // Ends the group because of this rank.
  void abort(const std::string& reason);
  // Fails an operation that can no longer complete, after a last try.  Requires the token of its lane.
  void fail_if_unreachable(Operation& op);
  // Whether an earlier operation failed by itself, so that this one must not begin.
  bool is_abandoned(const Request& request) const {
    return request.numbered() && request.channel >= first_abandoned_.load(std::memory_order_relaxed);
  }

  // Called by the links.
  // True if the group continues, and the lost members must learn it from their connections.
  bool on_peers_lost(const std::vector<Loss>& losses);
  // Whether this pairwise group has lost the member.
  bool lost(int rank);
  void on_peer_closed(int rank, std::uint64_t next_number, Departure why);
  void on_peer_closing(int rank, const FrameHeader& closing);
  void on_broken(int rank, Error error);

  // Announces that this member submits nothing more.  close() does it too, but groups that are closed one
  // after another must announce it together, since members may close them in different orders.
  void begin_close();
  // Waits until `deadline` for operations that can still complete, and for members that have not completed
  // this member's operations; then notifies the peers and fails the rest.
  void close(std::int64_t deadline);
  // Whether closing members wait for this one.
  bool has_unanswered_closings() const { return owes_answers_.load(std::memory_order_seq_cst); }
  bool closed() const { return closed_.load(); }
  bool all_peers_gone();
  // Closed after it broke, and all peers know the reason: none continues an operation.
  bool failure_announced() const { return all_told_.load(); }

 private:
  // This member's knowledge of a member.
  struct Member {
    std::uint64_t left_at = ~0ULL;  // the first number that it will not submit; ~0: it has not left
    bool program_ended = false;     // it left because its program ended
    std::optional<Loss> loss;
    std::uint64_t leaving = ~0ULL;  // like `left_at`, from when it submits nothing more
    bool has_read = false;          // it has read everything that this rank sent before closing
    bool finished = false;          // it has completed all operations of this rank
    std::uint64_t history = 0;      // hash of its calls when it leaves
    bool answered = false;          // it was notified that this rank has completed its operations
  };
  Member& member(int rank) { return members_[rank]; }
  Error eviction_error() const;
  std::optional<Error> lost_for(Operation& op);
  std::optional<int> missing_member_for(Operation& op);
  std::optional<Error> closing_for(Operation& op);
  Error departure(int rank, const Request& request);
  void abandon_from(std::uint64_t channel);
  void announce_closing(int rank, Closing what);
  void answer_leaving();
  bool settled();
  void announce_failure();

  std::shared_ptr<Context> context_;
  Options options_;
  std::vector<std::vector<int>> hosts_;
  int host_ = 0;
  std::unique_ptr<HostMembers> team_;
  Lanes lanes_;
  CallComparison inquiry_;
  Agreements agreements_;
  std::shared_ptr<Mover> mover_owner_;
  std::atomic<Mover*> mover_{nullptr};
  std::atomic<bool> abandoned_{false};
  friend class Operation;

  std::mutex goodbye_mutex_;
  bool said_goodbye_ = false;

  std::atomic<bool> broken_{false};
  std::atomic<bool> closed_{false};
  std::atomic<bool> all_told_{false};
  std::atomic<bool> any_member_left_{false};
  std::atomic<bool> any_lost_{false};  // pairwise groups only
  std::atomic<bool> leaving_{false};   // this member is closing
  std::atomic<bool> owes_answers_{false};
  std::atomic<std::uint64_t> first_abandoned_{~0ULL};  // the first numbered operation that failed by itself
  std::mutex state_mutex_;
  Error error_;
  std::vector<Member> members_;
  std::vector<std::weak_ptr<Block>> blocks_;
};

}  // namespace shoal
