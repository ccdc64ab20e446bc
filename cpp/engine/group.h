// A group in the core: its members, lanes and operations, and what ended it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/agreements.h"
#include "engine/inquiry.h"
#include "engine/lanes.h"
#include "engine/operation.h"
#include "engine/peers.h"
#include "engine/team.h"

namespace shoal {

class Context;

// The scope of a failure between two members: it ends the whole group, or only what these two exchange.
// A group of pairs carries messages only: ranks that went on after a collective which failed on one of them
// would be at different operations, so there is no failure of a collective that ends nothing else.
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
  };
  Group(std::shared_ptr<Context> context, Options options);
  ~Group();

  Context& context() const { return *context_; }
  std::uint64_t ident() const { return options_.ident; }
  const std::string& name() const { return options_.name; }
  int rank() const { return options_.rank; }
  int size() const { return static_cast<int>(options_.ranks.size()); }
  int global(int rank) const { return options_.ranks[static_cast<std::size_t>(rank)]; }
  int rank_of(int global) const;
  const std::vector<int>& ranks() const { return options_.ranks; }       // global, of the members
  const std::vector<std::vector<int>>& hosts() const { return hosts_; }  // members of each host, ascending
  int host() const { return host_; }                                     // index of this one
  int lane_count() const { return options_.lanes; }
  bool pairwise() const { return options_.scope == Scope::kPair; }
  Team* team() const { return team_.get(); }  // null if alone on this host
  Link* link(int rank) const;
  Lanes& lanes() { return lanes_; }
  Inquiry& inquiry() { return inquiry_; }
  Agreements& agreements() { return agreements_; }

  OperationPtr submit(Request request);
  // Deadlines and inquiries; the next time to look is written to `next` if earlier.
  void check(std::int64_t now, std::int64_t& next);
  std::shared_ptr<Block> allocate(std::size_t bytes);

  // A frame of this member, and its way to all others.
  FrameHeader frame(FrameType type) const;
  void tell(int rank, const FrameHeader& header, const std::string& text = {});
  void tell_all(const FrameHeader& header, const std::string& text = {});

  bool broken() const { return broken_.load(std::memory_order_acquire); }
  std::optional<Error> failure();
  // The error with all members that are lost by now, if it is about such.
  Error with_all_lost(Error error);
  // Ends the group with `error`, once; tells the peers if `announce`.
  void fail(Error error, bool announce);
  // Ends an operation that can no longer come to its end, after one more look at what came before the bad
  // news.  Under the token of its lane.
  void fail_if_in_vain(Operation& op);
  // An earlier operation was ended by itself, and this one must not begin.
  bool gave_up(const Request& request) const {
    return request.numbered() && request.channel >= given_up_.load(std::memory_order_relaxed);
  }

  // From the links.
  // True if the group goes on without them, and they have to hear from their connections that they are lost.
  bool on_peers_lost(const std::vector<Loss>& losses);
  // A group of pairs has lost this member.
  bool lost(int rank);
  void on_peer_closed(int rank, std::uint64_t next_number, Departure why);
  void on_peer_closing(int rank, const FrameHeader& closing);
  void on_broken(int rank, Error error);

  // Nothing more is submitted here: says so to the peers.  close() does it too, but groups that are closed
  // one after another say so all at once, since members may close them in different orders.
  void begin_close();
  // Waits until `deadline` for pending operations that can still be completed, and for the members that have
  // not finished what this one has submitted; tells the peers, and fails the rest.
  void close(std::int64_t deadline);
  // Whether members that close wait for this one.
  bool owes_answers() const { return owes_answers_.load(std::memory_order_seq_cst); }
  bool closed() const { return closed_.load(); }
  bool all_peers_gone();
  // Closed after it had broken, for a reason that the peers have been told: none goes on with an operation.
  bool all_told() const { return all_told_.load(); }

 private:
  // A member, as far as this one knows.
  struct Member {
    std::uint64_t departed = ~0ULL;  // the first number that it will not submit; ~0 while it is there
    bool program_ended = false;      // that is why it departed
    std::optional<Loss> loss;
    std::uint64_t leaving = ~0ULL;  // the same as `departed`, once it submits nothing more
    bool has_read = false;          // all that this rank had sent when it began to close
    bool finished = false;          // all that this rank has submitted
    std::uint64_t history = 0;      // of its calls, when it leaves
    bool answered = false;          // it knows that this rank has finished all that it had submitted
  };
  Member& member(int rank) { return members_[static_cast<std::size_t>(rank)]; }
  Error error_of_given_up() const;
  std::optional<Error> lost_for(Operation& op);
  std::optional<int> departed_for(Operation& op);
  std::optional<Error> closing_for(Operation& op);
  Error departure(int rank, const Request& request);
  void give_up_from(std::uint64_t channel);
  void tell_closing(int rank, Closing what);
  void answer_leaving();
  bool settled();
  void tell_failure();

  std::shared_ptr<Context> context_;
  Options options_;
  std::vector<std::vector<int>> hosts_;
  int host_ = 0;
  std::unique_ptr<Team> team_;
  Lanes lanes_;
  Inquiry inquiry_;
  Agreements agreements_;

  std::mutex goodbye_mutex_;
  bool said_goodbye_ = false;

  std::atomic<bool> broken_{false};
  std::atomic<bool> closed_{false};
  std::atomic<bool> all_told_{false};
  std::atomic<bool> any_departed_{false};
  std::atomic<bool> any_lost_{false};  // of a group of pairs
  std::atomic<bool> leaving_{false};   // this member closes
  std::atomic<bool> owes_answers_{false};
  std::atomic<std::uint64_t> given_up_{~0ULL};  // the first numbered operation that was ended by itself
  std::mutex state_mutex_;
  Error error_;
  std::vector<Member> members_;
  std::vector<std::weak_ptr<Block>> blocks_;
};

}  // namespace shoal
