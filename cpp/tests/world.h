// The ranks of one round, in one process: contexts connected by shared memory, by TCP over loopback, or both.
#pragma once

#include <memory>
#include <vector>

#include "engine/context.h"
#include "tests/fake_mpi.h"
#include "tests/support.h"

namespace shoal::stress {

class World {
 public:
  // The host of each rank: ranks with the same host share memory.  whole: the world of the same size that
  // counts the operations of this one, where the ranks are in the opposite order.
  explicit World(std::vector<int> hosts, const World* whole = nullptr);
  // A world of random size, more often small than large, and random topology.
  explicit World(Random& random);

  const std::vector<int>& hosts() const { return hosts_; }
  int size() const { return static_cast<int>(hosts_.size()); }
  int host(int rank) const { return hosts_[rank]; }
  Context& at(int rank) const { return *contexts_[rank]; }
  // The group of `members`, for `rank`.
  std::shared_ptr<Group> make_group(int rank, std::uint64_t ident, const std::vector<int>& members, int lanes,
                                    Scope scope = Scope::kAll, bool moved = false,
                                    Algorithm algorithm = Algorithm::kAuto) const;
  FakeMpi& mpi() const { return *mpi_; }

 private:
  void share(int a, int b);
  void connect(int a, int b);

  std::vector<int> hosts_;
  std::shared_ptr<FakeMpi> mpi_;
  std::vector<std::shared_ptr<Context>> contexts_;
};

}  // namespace shoal::stress
