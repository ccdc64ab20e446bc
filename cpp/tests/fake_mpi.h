// MPI among the ranks of this process, for the movers of cpp/mpi.
//
// The data of a call is delivered by the thread of the rank that sends the last part of it, also after the
// call was abandoned: memory that was freed too early is found by the address sanitizer.  So is that of a
// sender whose message is received later.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "engine/group.h"
#include "mpi/library.h"
#include "tests/support.h"

namespace shoal::stress {

class FakeMpi final : public mpi::Library, public std::enable_shared_from_this<FakeMpi> {
 public:
  // Makes the mover of a group, with a communicator for each lane.
  void connect(Group& group);
  // The next call of any rank fails, when it is begun or later.
  enum class Failure { kNone, kAtStart, kLater };
  void fail_next(Failure failure) { failure_.store(failure); }

  void all_reduce(const mpi::Whole& x, mpi::Handle op, mpi::Handle comm, mpi::Call& call) override;
  void reduce(const mpi::Whole& x, mpi::Handle op, int root, bool at_root, mpi::Handle comm,
              mpi::Call& call) override;
  void broadcast(const mpi::Whole& x, int root, mpi::Handle comm, mpi::Call& call) override;
  void all_gather(const mpi::Parts& parts, mpi::Handle comm, mpi::Call& call) override;
  void gather_parts(const mpi::Whole* from, const mpi::Parts* to, int root, mpi::Handle comm,
                    mpi::Call& call) override;
  void scatter_parts(const mpi::Parts* from, const mpi::Whole& to, int root, mpi::Handle comm,
                     mpi::Call& call) override;
  void reduce_scatter(const void* from, const mpi::Whole& to, const mpi::Counts& counts, mpi::Handle op,
                      mpi::Handle comm, mpi::Call& call) override;
  void all_to_all(const void* from, void* to, mpi::Handle type, mpi::Handle comm, mpi::Call& call) override;
  void all_to_all_parts(const mpi::Parts& from, const mpi::Parts& to, mpi::Handle comm,
                        mpi::Call& call) override;
  void exchange(const mpi::Parts& from, const mpi::Parts& to, mpi::Handle comm, mpi::Call& call) override;
  bool complete(mpi::Call& call) override;
  void progress() override {}

 private:
  using Bytes = std::vector<std::byte>;
  struct Receive {
    int source;
    std::byte* to;
    std::uint64_t bytes;
  };
  // The call of one rank.
  struct Posted {
    std::uint64_t request = 0;  // 0: not posted
    std::vector<Bytes> sent;    // for each rank; for all of them if it is one
    std::vector<Receive> receives;
    bool delivered = false;
  };
  struct Collective {
    const char* name = nullptr;
    std::vector<Posted> ranks;
    std::size_t delivered = 0;  // number of ranks
  };
  struct Message {
    std::uint64_t request;
    Span data;
  };
  // Between two ranks; one of these is empty.
  struct Messages {
    std::deque<Message> sends, receives;
  };
  struct Comm {
    explicit Comm(std::size_t size) : size(size) {}
    const std::size_t size;
    std::mutex mutex;
    std::map<std::uint64_t, Collective> collectives;
    std::map<std::pair<int, int>, Messages> messages;  // by source and destination
    std::uint64_t requests = 0;
    std::set<std::uint64_t> complete;  // requests
  };
  struct Member {
    std::shared_ptr<Comm> comm;
    int rank;
    std::uint64_t next = 0;
    Random random;
  };

  static Member& member_of(mpi::Handle comm) { return *reinterpret_cast<Member*>(comm); }
  void post(const char* name, Member& member, std::vector<Bytes> sent, std::vector<Receive> receives,
            mpi::Call& call);
  static void deliver(Comm& comm, Collective& collective);
  static void match(Comm& comm, Messages& messages);
  // Remembers a new request in `call`.  Requires the mutex of `comm`.
  static std::uint64_t add_request(Comm& comm, mpi::Call& call);
  void fail_at_start();

  std::atomic<Failure> failure_{Failure::kNone};
  std::mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<Comm>> comms_;
  std::vector<std::unique_ptr<Member>> members_;
};

}  // namespace shoal::stress
