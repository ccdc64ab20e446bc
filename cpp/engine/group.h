// A group in the core: its members, lanes and operations, and what ended it.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/operation.h"
#include "engine/team.h"

namespace shoal {

class Context;

// An algorithm instance: its operations run one after another, under whichever thread holds the token.
struct Lane {
  std::atomic_flag token;
  std::atomic<bool> missed{false};  // somebody found the token taken
  std::atomic<int> attended{0};     // threads in wait() that drive this lane
  std::mutex mutex;
  std::deque<OperationPtr> queue;
  int index = 0;
  std::atomic<std::uint64_t> next{0};  // the number of the first operation that has not completed
};

// A peer that died, or to which nothing leads any more.
struct Loss {
  int peer;  // global rank
  std::string why;
  ErrorCode code;
};

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
  int lanes() const { return options_.lanes; }
  bool pairwise() const { return options_.scope == Scope::kPair; }
  Team* team() const { return team_.get(); }  // null if alone on this host
  Link* link(int rank) const;

  OperationPtr submit(Request request);
  // Drives what stands between `op` and its completion; true if anything moved.
  bool drive(Operation& op);
  void attend(Operation& op, int change);
  // Drives everything that no thread attends.  `waiting`: such operations remain.
  bool progress(bool& waiting);
  // Deadlines and inquiries; the next time to look is written to `next` if earlier.
  void check(std::int64_t now, std::int64_t& next);
  bool pending();

  // The last numbered operation that has completed here together with all before it; -1: none has.
  std::int64_t last_completed() const;
  bool broken() const { return broken_.load(std::memory_order_acquire); }
  std::optional<Error> failure();
  // The error with all members that are lost by now, if it is about such.
  Error with_all_lost(Error error);
  // Ends the group with `error`, once; tells the peers if `announce`.
  void fail(Error error, bool announce);
  void suspect(std::uint64_t channel);  // a peer claims something else for it

  // From the links.
  // True if the group goes on without them, and they have to hear from their connections that they are lost.
  bool on_peers_lost(const std::vector<Loss>& losses);
  // A group of pairs has lost this member.
  bool lost(int rank);
  void on_peer_closed(int rank, std::uint64_t next_number, Departure why);
  void on_peer_closing(int rank, std::uint64_t next_number, bool has_read);
  void on_broken(int rank, ErrorCode code, const std::string& text);
  void on_call_query(int rank, const FrameHeader& query);
  void on_call_reply(int rank, const FrameHeader& header);
  void on_call_seen(std::uint64_t channel, const Fingerprint& call);

  // Nothing more is submitted here: says so to the peers.  close() does it too, but groups that are closed
  // one after another say so all at once, since members may close them in different orders.
  void begin_close();
  // Waits for pending operations that can still be completed until `deadline`, tells the peers, fails the
  // rest.
  void close(std::int64_t deadline);
  bool closed() const { return closed_.load(); }
  bool all_peers_gone();
  // Closed after it had broken, for a reason that the peers have been told: none goes on with an operation.
  bool all_told() const { return all_told_.load(); }
  std::shared_ptr<Block> allocate(std::size_t bytes);

  // Whether a blocked operation waits for something that can no longer come; says for whom.
  std::optional<int> departed_for(Operation& op);

 private:
  struct Inquiry {
    std::uint64_t channel = 0;
    bool mismatch = false;
    std::int64_t until = 0;
    std::string operation;
    std::int64_t timeout = 0;
    std::vector<std::optional<FrameHeader>> replies;
  };
  struct Recent {
    std::uint64_t channel = ~0ULL;
    Fingerprint call;
  };
  // How far operations are run: a thread that submits one only begins the large ones.
  enum class Effort { kBegin, kWhole };
  bool run(Lane& lane, Effort effort = Effort::kWhole);
  bool run_held(Lane& lane, Effort effort);
  void note(Operation& op);
  void begin_inquiry(std::uint64_t channel, bool mismatch, const std::string& operation,
                     std::int64_t timeout);
  void finish_inquiry();
  void compare_with_neighbour(const Operation& op);
  std::string table(const Inquiry& inquiry) const;
  std::string different_lanes(const Inquiry& inquiry) const;
  bool calls_differ(const Inquiry& inquiry) const;
  bool histories_differ(const Inquiry& inquiry) const;
  void settle(Operation& op);
  std::optional<Error> lost_for(Operation& op);
  std::optional<Error> in_vain(Operation& op);
  std::string departure(int rank, const Request& request);
  void give_up_from(std::uint64_t channel);
  void tell_closing(int rank, Closing what);
  FrameHeader frame(FrameType type) const;
  void tell_failure();
  void tell_all(const FrameHeader& header, const std::string& text = {});
  std::optional<Fingerprint> recent_call(std::uint64_t channel);

  std::shared_ptr<Context> context_;
  Options options_;
  std::vector<std::vector<int>> hosts_;
  int host_ = 0;
  std::unique_ptr<Team> team_;
  std::deque<Lane> lanes_;

  std::mutex farewell_mutex_;
  bool said_farewell_ = false;

  std::mutex loose_mutex_;
  struct Loose {
    OperationPtr op;
    std::shared_ptr<Lane> lane;
  };
  std::vector<Loose> loose_;  // keyed and point-to-point operations
  std::atomic<int> loose_count_{0};

  std::atomic<bool> broken_{false};
  std::atomic<bool> closed_{false};
  std::atomic<bool> all_told_{false};
  std::mutex state_mutex_;
  Error error_;
  std::vector<std::uint64_t>
      departed_;                     // per rank: the first number it will not submit; ~0 while it is there
  std::vector<bool> program_ended_;  // per rank: that is why it departed
  std::atomic<bool> any_departed_{false};
  std::map<int, Loss> lost_;           // members
  std::atomic<bool> any_lost_{false};  // of a group of pairs
  // Members that submit nothing more, though they may not have left yet; used by one that closes too.
  struct Leaving {
    std::uint64_t next_number = ~0ULL;  // ~0 while it goes on
    bool has_read = false;              // all that this rank had sent when it began to close
  };
  std::vector<Leaving> leaving_members_;
  std::atomic<bool> leaving_{false};            // this one closes
  std::atomic<std::uint64_t> given_up_{~0ULL};  // the first numbered operation that was ended by itself
  std::optional<Inquiry> inquiry_;
  std::mutex recent_mutex_;
  std::vector<Recent> recent_;
  std::uint64_t next_number_ = 0;
  std::uint64_t history_ = 0;
  std::vector<std::weak_ptr<Block>> blocks_;
  friend class Operation;
};

std::string seconds(std::int64_t nanoseconds);
std::string describe(const Fingerprint& call);
std::string describe(const Request& request);

}  // namespace shoal
