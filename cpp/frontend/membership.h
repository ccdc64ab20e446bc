// The place of this program in its job, from a helper process that runs the rendezvous in Python.
//
// The helper (src/shoal/backend/native/helper.py) meets the other ranks and connects to them; it passes the
// connections and the shared memory of the peers to this process.  It then keeps the membership, and the
// store if rank 0 serves it, until it is released.  It ends with this process, because its socket is closed.
// This process starts it, unless the launcher did (SHOAL_HELPER_FD); that helper serves one membership after
// another.
//
// Messages are those of a SOCK_SEQPACKET socket: a u32 with their kind, then little-endian fields without
// padding.  helper.py has the same table.
//
//   to the helper    kStart     {name '\0' value '\0'}...
//                    kMemory    u64 capacity, {u64 ring}... by rank; descriptors: memory, own pidfd
//                    kRelease   f64 timeout
//                    kAbandon   text: why this process could not connect
//   to the program   kMember    see Member; name of the first group '\0' job
//                    kPeer      i32 rank, i32 pid, u64 capacity, u64 out, u64 in; descriptors: socket, memory
//                               (no memory: the peer is remote)
//                    kConnected {i32 host}... by rank; descriptor: the file of the trace, if there is one
//                    kReleased
//                    kFailed    u32 count, {i32 rank}..., name '\0' message
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "engine/context.h"

namespace shoal::frontend_core {

using Options = std::vector<std::pair<std::string, std::string>>;

// The answer to kStart.
struct Member {
  Context::Options context;
  int local_rank = 0;
  double timeout = 0;            // seconds
  Agreements::Rules agreements;  // of all groups
  // The identity and the properties of the first group:
  std::uint64_t ident = 0;
  std::string name;
  int lanes = 1, algorithm = 0;
};

// A connected peer.  The descriptors belong to whoever takes them; the rest is closed.
struct Connection {
  int rank = -1, pid = 0;
  std::uint64_t capacity = 0, out = 0, in = 0;
  int socket = -1, memory = -1;
  Connection() = default;
  Connection(Connection&& other) noexcept;
  Connection& operator=(Connection&&) = delete;
  ~Connection();
};

class Membership {
 public:
  // Starts the helper and meets the other ranks.  Throws Failure.
  explicit Membership(const Options& options);
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  const Member& member() const { return member_; }
  // Connects to the other ranks: calls `add` for each.  Returns the index of each rank's host.
  // memory: of this process; rings: the offset of the ring for each rank.
  std::vector<int> connect(int memory, std::uint64_t capacity, const std::vector<std::uint64_t>& rings,
                           const std::function<void(Connection&)>& add);
  // Reports to the other ranks why this one cannot connect.
  void abandon(const std::string& why);
  // The file to which TraceFile appends; -1: this rank is not traced.  The caller takes it over.
  int take_trace();
  // Leaves the job, within `timeout` seconds.
  void release(double timeout);
  // In a forked child: forgets the helper, which belongs to the parent.
  void disown();

 private:
  struct Packet;
  bool use_inherited_helper();
  void start(const std::string& python);
  void send(std::uint32_t kind, const std::string& fields, const std::vector<int>& descriptors = {});
  Packet receive();
  Packet expect(std::uint32_t kind);
  void end();
  [[noreturn]] void fail_without_helper();

  std::string python_;
  int socket_ = -1, trace_ = -1;
  bool inherited_ = false;  // the launcher started the helper
  int process_ = -1;        // pidfd of the helper, if this process started it
  Member member_;
};

}  // namespace shoal::frontend_core
