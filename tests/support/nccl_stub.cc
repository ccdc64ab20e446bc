// The functions of nccl.h that shoal calls; each prints its arguments, with addresses as numbers.
#include <cstddef>
#include <cstdint>
#include <iostream>

namespace {

using Address = std::intptr_t;

constexpr int kSuccess = 0, kInProgress = 7;
constexpr Address kComm = 0x7f0123456780;

struct UniqueId {
  char internal[128];
};

// The beginning of ncclConfig_t.
struct Config {
  std::size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
};

template <class... Args>
int print(const char* name, const Args&... args) {
  std::cout << name;
  ((std::cout << ' ' << args), ...);
  std::cout << std::endl;
  return kInProgress;
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = 22809;
  return kSuccess;
}

int ncclGetUniqueId(UniqueId* id) {
  for (int i = 0; i < 128; i++) id->internal[i] = static_cast<char>(i);
  return kSuccess;
}

int ncclCommInitRankConfig(Address* comm, int size, UniqueId id, int rank, Config* config) {
  *comm = kComm;
  return print("init", size, int{id.internal[1]}, int{id.internal[127]}, rank, config->magic,
               config->blocking, config->max_ctas);
}

int ncclCommGetAsyncError(Address comm, int* result) {
  *result = kInProgress;
  print("async_error", comm);
  return kSuccess;
}

const char* ncclGetLastError(Address comm) {
  print("last_error", comm);
  return "the last error";
}

const char* ncclGetErrorString(int result) { return result == 6 ? "remote error" : "another error"; }

int ncclCommFinalize(Address comm) { return print("finalize", comm); }
int ncclCommDestroy(Address comm) { return print("destroy", comm); }
int ncclCommAbort(Address comm) { return print("abort", comm); }
int ncclGroupStart() { return print("group_start"); }
int ncclGroupEnd() { return print("group_end"); }

int ncclAllReduce(Address send, Address receive, std::size_t count, int dtype, int op, Address comm,
                  Address stream) {
  return print("all_reduce", send, receive, count, dtype, op, comm, stream);
}

int ncclReduce(Address send, Address receive, std::size_t count, int dtype, int op, int root, Address comm,
               Address stream) {
  return print("reduce", send, receive, count, dtype, op, root, comm, stream);
}

int ncclBroadcast(Address send, Address receive, std::size_t count, int dtype, int root, Address comm,
                  Address stream) {
  return print("broadcast", send, receive, count, dtype, root, comm, stream);
}

int ncclAllGather(Address send, Address receive, std::size_t count, int dtype, Address comm, Address stream) {
  return print("all_gather", send, receive, count, dtype, comm, stream);
}

int ncclReduceScatter(Address send, Address receive, std::size_t count, int dtype, int op, Address comm,
                      Address stream) {
  return print("reduce_scatter", send, receive, count, dtype, op, comm, stream);
}

int ncclSend(Address send, std::size_t count, int dtype, int peer, Address comm, Address stream) {
  return print("send", send, count, dtype, peer, comm, stream);
}

int ncclRecv(Address receive, std::size_t count, int dtype, int peer, Address comm, Address stream) {
  return print("recv", receive, count, dtype, peer, comm, stream);
}
}
