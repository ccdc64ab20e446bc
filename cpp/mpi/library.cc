#include "mpi/library.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <type_traits>

namespace shoal::mpi {
namespace {

// Larger than MPI_Status and MPI_MAX_ERROR_STRING of any library.
constexpr std::size_t kStatusBytes = 256, kErrorBytes = 8192;
// The tag of all messages: a communicator belongs to a lane, whose operations follow one another.
constexpr int kTag = 0;

template <typename Function>
Function* look_up(const Library::Functions& functions, const std::string& name) {
  auto found = functions.find(name);
  if (found == functions.end() || found->second == 0)
    throw std::invalid_argument("the MPI library has no " + name);
  return reinterpret_cast<Function*>(found->second);
}

}  // namespace

Counts starts_of(const Counts& counts) {
  Counts starts;
  std::uint64_t at = 0;
  for (std::uint64_t count : counts) {
    starts.push_back(at);
    at += count;
  }
  return starts;
}

const std::vector<std::string>& Library::with_counts() {
  static const std::vector<std::string> names{"MPI_Iallreduce", "MPI_Ireduce",         "MPI_Ibcast",
                                              "MPI_Iallgather", "MPI_Iallgatherv",     "MPI_Igatherv",
                                              "MPI_Iscatterv",  "MPI_Ireduce_scatter", "MPI_Ialltoall",
                                              "MPI_Ialltoallv", "MPI_Isend",           "MPI_Irecv"};
  return names;
}

const std::vector<std::string>& Library::others() {
  static const std::vector<std::string> names{"MPI_Test", "MPI_Iprobe", "MPI_Error_string"};
  return names;
}

// H: the type of handles.  N: of counts.  D: of displacements.
template <typename H, typename N, typename D>
class LibraryOf final : public Library {
 public:
  LibraryOf(const Functions& functions, const Constants& constants) : constants_(constants) {
    const std::string c = std::is_same_v<N, int> ? "" : "_c";
    auto get = [&functions](auto*& function, const std::string& name) {
      function = look_up<std::remove_pointer_t<std::remove_reference_t<decltype(function)>>>(functions, name);
    };
    get(all_reduce_, "MPI_Iallreduce" + c);
    get(reduce_, "MPI_Ireduce" + c);
    get(broadcast_, "MPI_Ibcast" + c);
    get(all_gather_, "MPI_Iallgather" + c);
    get(all_gather_parts_, "MPI_Iallgatherv" + c);
    get(gather_parts_, "MPI_Igatherv" + c);
    get(scatter_parts_, "MPI_Iscatterv" + c);
    get(reduce_scatter_, "MPI_Ireduce_scatter" + c);
    get(all_to_all_, "MPI_Ialltoall" + c);
    get(all_to_all_parts_, "MPI_Ialltoallv" + c);
    get(send_, "MPI_Isend" + c);
    get(receive_, "MPI_Irecv" + c);
    get(test_, "MPI_Test");
    get(probe_, "MPI_Iprobe");
    get(error_string_, "MPI_Error_string");
  }

  void all_reduce(const Whole& x, Handle op, Handle comm, Call& call) override {
    begin(call, all_reduce_, constants_.in_place, x.data, number(x.count), h(x.type), h(op), h(comm));
  }
  void reduce(const Whole& x, Handle op, int root, bool at_root, Handle comm, Call& call) override {
    begin(call, reduce_, at_root ? constants_.in_place : x.data, at_root ? x.data : nullptr, number(x.count),
          h(x.type), h(op), root, h(comm));
  }
  void broadcast(const Whole& x, int root, Handle comm, Call& call) override {
    begin(call, broadcast_, x.data, number(x.count), h(x.type), root, h(comm));
  }
  void all_gather(const Parts& parts, Handle comm, Call& call) override {
    const H type = h(parts.type);
    const bool equal = std::ranges::count(parts.counts, parts.counts[0]) == std::ssize(parts.counts);
    if (equal)
      begin(call, all_gather_, constants_.in_place, N{0}, type, parts.data, number(parts.counts[0]), type,
            h(comm));
    else
      begin(call, all_gather_parts_, constants_.in_place, N{0}, type, parts.data, counts(call, parts.counts),
            starts(call, parts.starts), type, h(comm));
  }
  void gather_parts(const Whole* from, const Parts* to, int root, Handle comm, Call& call) override {
    const H type = h(from != nullptr ? from->type : to->type);
    begin(call, gather_parts_, from != nullptr ? from->data : constants_.in_place,
          number(from != nullptr ? from->count : 0), type, to != nullptr ? to->data : nullptr,
          to != nullptr ? counts(call, to->counts) : nullptr,
          to != nullptr ? starts(call, to->starts) : nullptr, type, root, h(comm));
  }
  void scatter_parts(const Parts* from, const Whole& to, int root, Handle comm, Call& call) override {
    begin(call, scatter_parts_, from != nullptr ? from->data : nullptr,
          from != nullptr ? counts(call, from->counts) : nullptr,
          from != nullptr ? starts(call, from->starts) : nullptr, h(to.type), to.data, number(to.count),
          h(to.type), root, h(comm));
  }
  void reduce_scatter(const void* from, const Whole& to, const Counts& parts, Handle op, Handle comm,
                      Call& call) override {
    begin(call, reduce_scatter_, from, to.data, counts(call, parts), h(to.type), h(op), h(comm));
  }
  void all_to_all(const void* from, void* to, Handle type, Handle comm, Call& call) override {
    begin(call, all_to_all_, from, N{1}, h(type), to, N{1}, h(type), h(comm));
  }
  void all_to_all_parts(const Parts& from, const Parts& to, Handle comm, Call& call) override {
    begin(call, all_to_all_parts_, from.data, counts(call, from.counts), starts(call, from.starts),
          h(from.type), to.data, counts(call, to.counts), starts(call, to.starts), h(to.type), h(comm));
  }
  void exchange(const Parts& from, const Parts& to, Handle comm, Call& call) override {
    for (std::size_t rank = 0; rank < to.counts.size(); ++rank)
      if (to.counts[rank] > 0)
        begin(call, receive_, to.of(rank).data, number(to.counts[rank]), h(to.type), static_cast<int>(rank),
              kTag, h(comm));
    for (std::size_t rank = 0; rank < from.counts.size(); ++rank)
      if (from.counts[rank] > 0)
        begin(call, send_, from.of(rank).data, number(from.counts[rank]), h(from.type),
              static_cast<int>(rank), kTag, h(comm));
  }

  bool complete(Call& call) override {
    while (!call.requests.empty()) {
      alignas(16) std::byte status[kStatusBytes];
      int done = 0;
      const int code = test_(reinterpret_cast<Request>(&call.requests.back()), &done, status);
      if (code != 0) call.failure = text_of(code);
      if (code != 0 || done == 0) return code != 0;
      call.requests.pop_back();
    }
    return true;
  }

  void progress() override {
    alignas(16) std::byte status[kStatusBytes];
    int found = 0;
    probe_(constants_.any_source, constants_.any_tag, h(constants_.self), &found, status);
  }

 private:
  using Request = H*;

  static H h(Handle handle) {
    if constexpr (std::is_pointer_v<H>)
      return reinterpret_cast<H>(handle);
    else
      return static_cast<H>(handle);
  }

  template <typename T>
  static T fitted(std::uint64_t value) {
    if (value > static_cast<std::uint64_t>(std::numeric_limits<T>::max()))
      throw MoverFailed("this MPI library has no large counts, and " + std::to_string(value) +
                        " elements are more than 2**31 - 1: split the tensor, or use a library of MPI 4");
    return static_cast<T>(value);
  }
  static N number(std::uint64_t value) { return fitted<N>(value); }

  // An array in the memory of the call.
  template <typename T>
  static const T* array(Call& call, const Counts& values) {
    auto& kept = call.arrays.emplace_back((values.size() * sizeof(T) + 7) / 8 + 1);
    T* to = reinterpret_cast<T*>(kept.data());
    for (std::size_t i = 0; i < values.size(); ++i) new (to + i) T(fitted<T>(values[i]));
    return to;
  }
  static const N* counts(Call& call, const Counts& values) { return array<N>(call, values); }
  static const D* starts(Call& call, const Counts& values) { return array<D>(call, values); }

  template <typename Function, typename... Arguments>
  void begin(Call& call, Function function, Arguments... arguments) const {
    const int code = function(arguments..., reinterpret_cast<Request>(&call.requests.emplace_back()));
    if (code == 0) return;
    call.requests.pop_back();
    throw MoverFailed(text_of(code));
  }
  std::string text_of(int code) const {
    std::string text(kErrorBytes, '\0');
    int length = 0;
    if (error_string_(code, text.data(), &length) != 0) length = 0;
    text.resize(static_cast<std::size_t>(std::clamp<int>(length, 0, kErrorBytes)));
    return "MPI failed there: " + (text.empty() ? "error " + std::to_string(code) : text);
  }

  Constants constants_;
  int (*all_reduce_)(const void*, void*, N, H, H, H, Request);
  int (*reduce_)(const void*, void*, N, H, H, int, H, Request);
  int (*broadcast_)(void*, N, H, int, H, Request);
  int (*all_gather_)(const void*, N, H, void*, N, H, H, Request);
  int (*all_gather_parts_)(const void*, N, H, void*, const N*, const D*, H, H, Request);
  int (*gather_parts_)(const void*, N, H, void*, const N*, const D*, H, int, H, Request);
  int (*scatter_parts_)(const void*, const N*, const D*, H, void*, N, H, int, H, Request);
  int (*reduce_scatter_)(const void*, void*, const N*, H, H, H, Request);
  int (*all_to_all_)(const void*, N, H, void*, N, H, H, Request);
  int (*all_to_all_parts_)(const void*, const N*, const D*, H, void*, const N*, const D*, H, H, Request);
  int (*send_)(const void*, N, H, int, int, H, Request);
  int (*receive_)(void*, N, H, int, int, H, Request);
  int (*test_)(Request, int*, void*);
  int (*probe_)(int, int, H, int*, void*);
  int (*error_string_)(int, char*, int*);
};

std::shared_ptr<Library> Library::make(const Functions& functions, std::size_t handle_bytes,
                                       const Constants& constants) {
  bool large = true;
  for (const std::string& name : with_counts()) large &= functions.contains(name + "_c");
  if (handle_bytes != sizeof(int) && handle_bytes != sizeof(void*))
    throw std::invalid_argument("handles of MPI have " + std::to_string(handle_bytes) + " bytes");
  if (handle_bytes == sizeof(int)) {
    if (large) return std::make_shared<LibraryOf<int, std::int64_t, std::intptr_t>>(functions, constants);
    return std::make_shared<LibraryOf<int, int, int>>(functions, constants);
  }
  if (large) return std::make_shared<LibraryOf<void*, std::int64_t, std::intptr_t>>(functions, constants);
  return std::make_shared<LibraryOf<void*, int, int>>(functions, constants);
}

}  // namespace shoal::mpi
