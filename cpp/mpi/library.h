// The nonblocking operations of an MPI library that the process has loaded.
//
// Libraries differ in the type of handles (an int in MPICH, a pointer in Open MPI) and have counts of 64 bits
// since MPI 4.  Here handles are their bits, and counts have 64 bits; a library without large counts refuses
// those above 2**31 - 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/mover.h"
#include "engine/operation.h"

namespace shoal::mpi {

using Handle = std::uintptr_t;  // of a communicator, datatype or operation
using Counts = std::vector<std::uint64_t>;

// Keeps an object until the process ends, because MPI may still use its memory.
template <typename T>
void keep_forever(T object) {
  static std::mutex mutex;
  static auto* kept = new std::vector<T>;
  std::lock_guard lock(mutex);
  kept->push_back(std::move(object));
}

// A call on its way, of one or more operations of MPI.  Destroyed before it is complete, it abandons its
// operation: MPI then keeps using the memory that was passed to it.
struct Call {
  explicit Call(Operation& op) : op(op) {}
  ~Call() {
    if (requests.empty()) return;
    op.abandon();
    keep_forever(std::move(arrays));
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  Operation& op;
  std::string failure;                            // why it failed, if it did
  std::vector<std::uint64_t> requests;            // of the library, for what is not complete
  std::vector<std::vector<std::int64_t>> arrays;  // counts and displacements in the types of the library
};

// Where each part begins, in elements, if they follow one another.
Counts starts_of(const Counts& counts);

// The parts of a tensor, in elements of `type`.
struct Parts {
  void* data;
  Counts counts, starts;
  Handle type;
  std::size_t item;  // bytes of an element

  Span of(std::size_t rank) const {
    return {static_cast<std::byte*>(data) + starts[rank] * item, counts[rank] * item};
  }
};
struct Whole {
  void* data;
  std::uint64_t count;
  Handle type;
};

// Not thread-safe in a communicator; different communicators may be used at the same time.  The functions
// that begin a call throw MoverFailed if MPI returns an error.
class Library : public MovingLibrary {
 public:
  struct Constants {
    void* in_place;
    int any_source, any_tag;
    Handle self;  // MPI_COMM_SELF
  };
  // The addresses of MPI's functions by name; in MPI 4 those with large counts also exist, and end with _c.
  using Functions = std::unordered_map<std::string, std::uintptr_t>;
  // Names of the functions, without _c.
  static const std::vector<std::string>& with_counts();
  static const std::vector<std::string>& others();
  // Throws std::invalid_argument if a function is missing.
  static std::shared_ptr<Library> make(const Functions& functions, std::size_t handle_bytes,
                                       const Constants& constants);

  virtual void all_reduce(const Whole& x, Handle op, Handle comm, Call& call) = 0;  // in place
  // In place at the root.
  virtual void reduce(const Whole& x, Handle op, int root, bool at_root, Handle comm, Call& call) = 0;
  virtual void broadcast(const Whole& x, int root, Handle comm, Call& call) = 0;
  // Each rank's part is in its place.
  virtual void all_gather(const Parts& parts, Handle comm, Call& call) = 0;
  // `to`: of the root, whose part is in its place.  `from`: of the others.
  virtual void gather_parts(const Whole* from, const Parts* to, int root, Handle comm, Call& call) = 0;
  virtual void scatter_parts(const Parts* from, const Whole& to, int root, Handle comm, Call& call) = 0;
  virtual void reduce_scatter(const void* from, const Whole& to, const Counts& counts, Handle op, Handle comm,
                              Call& call) = 0;
  // One element for each rank.
  virtual void all_to_all(const void* from, void* to, Handle type, Handle comm, Call& call) = 0;
  virtual void all_to_all_parts(const Parts& from, const Parts& to, Handle comm, Call& call) = 0;
  // The same by a message for each part that is not empty; this rank's own part must be.
  virtual void exchange(const Parts& from, const Parts& to, Handle comm, Call& call) = 0;

  // Advances a call; whether it is complete or has failed.
  virtual bool complete(Call& call) = 0;
};

}  // namespace shoal::mpi
