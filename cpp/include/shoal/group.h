// Process groups: `shoal::init`, collectives, messages, groups made from a group.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "shoal/abi.h"
#include "shoal/error.h"
#include "shoal/future.h"
#include "shoal/types.h"

namespace shoal {
inline namespace frontend {

namespace detail {

// A number with up to 15 digits, as Python's f"{number:.15g}", also in programs that set a locale.
inline std::string number_text(double number) {
  std::array<char, 64> text{};
  const auto end =
      std::to_chars(text.data(), text.data() + text.size(), number, std::chars_format::general, 15);
  return std::string(text.data(), end.ptr);
}

}  // namespace detail

/// The state of a group on one rank.  Aborted: a rank called `abort`.  Broken: the group failed for another
/// reason.  Forked: the process is a forked child of the one that made the group.
enum class GroupState { open = 0, closing = 1, closed = 2, aborted = 3, broken = 4, forked = 5 };

/// Arguments of `init`; what is not set comes from the environment, as in Python.
struct InitOptions {
  /// Where to find the other processes: "env://" (the default), "tcp://host:port", "file:///path", or another
  /// URL of docs/rendezvous.md.
  std::string url;
  /// Rank of this process and number of processes; not set: by the launcher, else in order of arrival.
  std::optional<int> rank, size;
  /// Timeout of the rendezvous, and default of the group's operations; not set: SHOAL_TIMEOUT (300 s).
  std::optional<Seconds> timeout;
  /// The job's secret; not set: SHOAL_SECRET or SHOAL_SECRET_FILE, else a file of this user.
  std::string secret;
  /// Name of the group, for errors.
  std::string name = "world";
  /// Maximum number of collectives of a group in progress at once; not set: SHOAL_CONCURRENCY (1).
  std::optional<int> concurrency;
  /// Algorithm between hosts: "auto", "direct", "doubling", "halving" or "ring", the same on all ranks; not
  /// set: SHOAL_ALGORITHM ("auto").
  std::string algorithm;
  /// Identity of this host; ranks with different values do not share memory.
  std::string host_id;
  /// Name of the job; processes with the same name form a group.
  std::string job;
  /// "auto" uses shared memory where possible, "shm" requires it, "tcp" never uses it.
  std::string transport;
};

/// A received message.
template <class T>
struct Message {
  T tensor;
  int source;  ///< rank of the sender
};

/// A group of processes that communicate with each other, made by `init` and `split`.
///
/// Copies are handles of one group.  The last one closes it; if an exception is leaving its scope then, the
/// group is aborted first, so that the other ranks do not wait.  Several threads may use a group if all ranks
/// submit collectives in the same order.  Python ranks can be members.
///
/// Operations take at::Tensor (after `#include <shoal/torch.h>`) or Array.  They return at once; an error
/// that other ranks or the network cause is thrown by `Future::wait`, a wrong argument at once (UsageError).
/// The tensors of a collective have the same dtype and, unless noted, number of elements on all ranks.  They
/// must be contiguous and on the CPU, and must not be used before the operation is complete.
/// `timeout` is that of the operation in seconds; 0: that of the group.  An operation that times out breaks
/// the group.
class Group {
 public:
  /// Rank of this process in the group.
  int rank() const { return info().rank; }
  /// Number of ranks.
  int size() const { return info().size; }
  /// Rank of this process among those that the launcher started on this host.
  int local_rank() const { return info().local_rank; }
  /// Number of processes that the launcher started on this host.
  int local_size() const { return info().local_size; }
  /// Unique in the job, and equal on all members.
  std::string name() const { return info().name; }
  /// The members' ranks in the first group of the job.
  std::vector<int> ranks() const {
    const shoal_group_info now = info();
    return std::vector<int>(now.ranks, now.ranks + now.size);
  }
  /// Default timeout of operations.
  Seconds timeout() const { return Seconds(info().timeout); }
  /// The state of the group on this rank.
  GroupState state() const { return static_cast<GroupState>(shoal_group_state(get())); }

  /// Reduces `x` over all ranks, in place on every rank.  The result is bitwise equal on all ranks.
  template <class T>
  Future<T> all_reduce(T x, ReduceOp op = sum, Seconds timeout = {}) const {
    const View view = of(x, "all_reduce");
    return collective<T>(SHOAL_ALL_REDUCE, {view}, {view}, x, timeout, op);
  }

  /// Reduces `x` over all ranks into `x` of rank `root`; other ranks' `x` is not changed.
  template <class T>
  Future<T> reduce(T x, int root = 0, ReduceOp op = sum, Seconds timeout = {}) const {
    const View view = of(x, "reduce");
    return collective<T>(SHOAL_REDUCE, {view}, rank() == root ? Views{view} : Views{}, x, timeout, op, root);
  }

  /// Copies `x` of rank `root` into `x` of all other ranks.
  template <class T>
  Future<T> broadcast(T x, int root = 0, Seconds timeout = {}) const {
    const View view = of(x, "broadcast");
    return collective<T>(SHOAL_BROADCAST, rank() == root ? Views{view} : Views{}, {view}, x, timeout, sum,
                         root);
  }

  /// Gathers the tensors of all ranks, which have equal shapes, on all ranks; element r is that of rank r.
  template <class T>
  Future<std::vector<T>> all_gather(T x, Seconds timeout = {}) const {
    return all_gather(like(x, size()), x, timeout);
  }

  /// The same into `out`, one tensor per rank, whose sizes may differ.
  template <class T>
  Future<std::vector<T>> all_gather(std::vector<T> out, T x, Seconds timeout = {}) const {
    const Views outputs = one_per_rank(out, "all_gather", "out");
    const View input = of(x, "all_gather");
    expect(outputs[here()].count == input.count, "all_gather", "out of this rank must have the size of x");
    return collective<std::vector<T>>(SHOAL_ALL_GATHER, {input}, outputs, std::move(out), timeout, sum, -1,
                                      counts(outputs));
  }

  /// Gathers the tensors of all ranks, concatenated in `out`, which has `size()` times the elements of `x`.
  template <class T>
  Future<T> all_gather_single(T out, T x, Seconds timeout = {}) const {
    const View output = of(out, "all_gather_single"), input = of(x, "all_gather_single");
    expect(output.count == input.count * ranks_count(), "all_gather_single",
           "out must have as many elements as x has, times the number of ranks");
    return collective<T>(SHOAL_ALL_GATHER, {input}, {output}, out, timeout, sum, -1,
                         equal_parts(input.count));
  }

  /// Reduces each of `inputs` over all ranks; rank r gets the result of `inputs[r]` in `out`.
  template <class T>
  Future<T> reduce_scatter(T out, const std::vector<T>& inputs, ReduceOp op = sum,
                           Seconds timeout = {}) const {
    const Views views = one_per_rank(inputs, "reduce_scatter", "inputs");
    const View output = of(out, "reduce_scatter");
    expect(output.count == views[here()].count, "reduce_scatter",
           "out must have the size of this rank's element of inputs");
    return collective<T>(SHOAL_REDUCE_SCATTER, views, {output}, out, timeout, op, -1, counts(views), inputs);
  }

  /// Reduces `x` over all ranks; rank r gets the r-th of `size()` equal parts of the result in `out`.
  template <class T>
  Future<T> reduce_scatter_single(T out, T x, ReduceOp op = sum, Seconds timeout = {}) const {
    const View output = of(out, "reduce_scatter_single"), input = of(x, "reduce_scatter_single");
    expect(input.count == output.count * ranks_count(), "reduce_scatter_single",
           "x must have as many elements as out has, times the number of ranks");
    return collective<T>(SHOAL_REDUCE_SCATTER, {input}, {output}, out, timeout, op, -1,
                         equal_parts(output.count), x);
  }

  /// Gathers the tensors of all ranks, which have equal shapes, on rank `root`; empty on other ranks.
  template <class T>
  Future<std::vector<T>> gather(T x, int root = 0, Seconds timeout = {}) const {
    std::vector<T> out = rank() == root ? like(x, size()) : std::vector<T>();
    const View input = of(x, "gather");
    Views outputs;
    for (const T& part : out) outputs.push_back(of(part, "gather"));
    return collective<std::vector<T>>(SHOAL_GATHER, {input}, outputs, std::move(out), timeout, sum, root,
                                      equal_parts(input.count), x);
  }

  /// Sends one of `inputs`, which have equal shapes and are given on rank `root` only, to each rank.
  template <class T>
  Future<T> scatter(T out, const std::vector<T>& inputs = {}, int root = 0, Seconds timeout = {}) const {
    expect(rank() == root || inputs.empty(), "scatter", "only root passes inputs");
    const View output = of(out, "scatter");
    Views views;
    if (rank() == root) views = one_per_rank(inputs, "scatter", "inputs");
    for (const View& view : views)
      expect(view.count == output.count, "scatter", "each element of inputs must have the size of out");
    return collective<T>(SHOAL_SCATTER, views, {output}, out, timeout, sum, root, equal_parts(output.count),
                         inputs);
  }

  /// Sends `inputs[r]` to rank r, and receives from rank r in `out[r]`; sizes may differ.
  template <class T>
  Future<std::vector<T>> all_to_all(std::vector<T> out, const std::vector<T>& inputs,
                                    Seconds timeout = {}) const {
    const Views outputs = one_per_rank(out, "all_to_all", "out");
    const Views views = one_per_rank(inputs, "all_to_all", "inputs");
    expect(outputs[here()].count == views[here()].count, "all_to_all",
           "this rank's part for itself must have the same size in out and inputs");
    return collective<std::vector<T>>(SHOAL_ALL_TO_ALL, views, outputs, std::move(out), timeout, sum, -1, {},
                                      inputs);
  }

  /// Splits `x` into `size()` equal parts, sends part r to rank r, and concatenates what arrives in `out`.
  template <class T>
  Future<T> all_to_all_single(T out, T x, Seconds timeout = {}) const {
    const View output = of(out, "all_to_all_single"), input = of(x, "all_to_all_single");
    expect(output.count == input.count && input.count % ranks_count() == 0, "all_to_all_single",
           "out and x must have the same number of elements, a multiple of the number of ranks");
    return collective<T>(SHOAL_ALL_TO_ALL, parts(input), parts(output), out, timeout, sum, -1, {}, x);
  }

  /// Completes when every rank of the group has called it.
  Future<void> barrier(Seconds timeout = {}) const {
    return collective<void>(SHOAL_BARRIER, {}, {}, {}, timeout);
  }

  /// Sends `x` to rank `to`.  The future completes when `x` may be changed; the message may still be on its
  /// way.  tag: 0 to 2^30 - 1; the receiver must pass the same.
  template <class T>
  Future<void> send(T x, int to, std::uint64_t tag = 0, Seconds timeout = {}) const {
    return future<void>(message(SHOAL_SEND, x, "send", to, tag, timeout), {}, x);
  }

  /// Receives into `x` a message with its dtype and number of elements.
  template <class T>
  Future<T> recv(T x, int from = any_source, std::uint64_t tag = 0, Seconds timeout = {}) const {
    return future<T>(message(SHOAL_RECV, x, "recv", from, tag, timeout), x);
  }

  /// The same; the value also has the rank of the sender.
  template <class T>
  Future<Message<T>> recv_message(T x, int from = any_source, std::uint64_t tag = 0,
                                  Seconds timeout = {}) const {
    shoal_operation* operation = message(SHOAL_RECV, x, "recv_message", from, tag, timeout);
    return Future<Message<T>>(std::make_shared<detail::FutureState<Message<T>>>(
        operation, Message<T>{x, from}, [operation](Message<T>& received) {
          std::int32_t source = -1;
          shoal_operation_received(operation, &source, nullptr);
          received.source = source;
        }));
  }

  /// Uninitialised elements in memory that all ranks of this host share, where collectives are fastest.
  template <class E>
  Array<E> empty(std::size_t count) const {
    constexpr std::size_t most = std::numeric_limits<std::ptrdiff_t>::max() / sizeof(E);
    auto [data, owner] = allocate(std::min(count, most) * sizeof(E));  // more than `most` do not exist
    return Array<E>(static_cast<E*>(data), count, std::move(owner));
  }
  /// Bytes of such memory, and their owner.
  std::pair<void*, std::shared_ptr<void>> allocate(std::size_t bytes) const {
    void *data = nullptr, *owner = nullptr;
    detail::check(shoal_group_allocate(get(), bytes, &data, &owner));
    return {data, std::shared_ptr<void>(owner, shoal_memory_free)};
  }

  /// Splits the group into groups of ranks with the same `color`; every rank calls it.
  ///
  /// color: no value: this rank is in no new group, and gets none.
  /// key: ranks in the new group are ordered by it, then by rank; not set: by rank.
  std::optional<Group> split(std::optional<std::int64_t> color,
                             std::optional<std::int64_t> key = std::nullopt, Seconds timeout = {}) const {
    shoal_group* made = nullptr;
    detail::check(
        shoal_group_split(get(), color ? &*color : nullptr, key.value_or(rank()), timeout.count(), &made));
    return made == nullptr ? std::nullopt : std::optional(Group(made));
  }

  /// Aborts the group on all ranks: pending and later operations fail with GroupAborted.  Any thread.
  void abort(const std::string& reason = "") const { shoal_group_abort(get(), reason.c_str()); }

  /// Completes submitted operations, notifies the other ranks, and releases all resources.
  ///
  /// A hung peer delays it by at most `timeout`.  Throws CollectiveMismatch if the ranks called different
  /// operations and no operation has thrown it here.  Groups made from this one stay open.
  void close(Seconds timeout = {}) const { detail::check(shoal_group_close(get(), timeout.count())); }

  explicit Group(shoal_group* group) : handle_(std::make_shared<Handle>(group)) {}

 private:
  using View = detail::View;
  using Views = std::vector<View>;
  struct Handle {
    explicit Handle(shoal_group* made) : group(made) {}
    ~Handle() {
      if (std::uncaught_exceptions() > exceptions)
        shoal_group_abort(group, "an exception left the scope of the group");
      shoal_group_free(group);
    }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;
    shoal_group* const group;
    const int exceptions = std::uncaught_exceptions();
  };

  shoal_group* get() const { return handle_->group; }
  shoal_group_info info() const { return shoal_group_describe(get()); }
  std::size_t here() const { return static_cast<std::size_t>(rank()); }
  std::uint64_t ranks_count() const { return static_cast<std::uint64_t>(size()); }

  template <class T>
  static View of(const T& x, const char* operation) {
    return detail::Tensors<T>::view(x, operation);
  }
  template <class T>
  static std::vector<T> like(const T& x, int count) {
    std::vector<T> made;
    for (int i = 0; i < count; ++i) made.push_back(detail::Tensors<T>::like(x));
    return made;
  }
  void expect(bool valid, const char* operation, const char* requirement) const {
    if (!valid)
      throw UsageError(std::string(operation) + " on rank " + std::to_string(rank()) + " of group '" +
                       name() + "': " + requirement);
  }
  template <class T>
  Views one_per_rank(const std::vector<T>& tensors, const char* operation, const char* what) const {
    expect(tensors.size() == ranks_count(), operation,
           (std::string(what) + " must have one tensor for each rank").c_str());
    Views views;
    for (const T& tensor : tensors) views.push_back(of(tensor, operation));
    return views;
  }
  static std::vector<std::uint64_t> counts(const Views& views) {
    std::vector<std::uint64_t> result;
    for (const View& view : views) result.push_back(view.count);
    return result;
  }
  std::vector<std::uint64_t> equal_parts(std::uint64_t count) const {
    return std::vector<std::uint64_t>(ranks_count(), count);
  }
  Views parts(const View& whole) const {
    Views result;
    const std::uint64_t bytes = whole.bytes / ranks_count();
    for (std::uint64_t i = 0; i < ranks_count(); ++i)
      result.push_back(
          {static_cast<char*>(whole.data) + i * bytes, whole.count / ranks_count(), bytes, whole.dtype});
    return result;
  }

  // The future of an operation with the value `value`; `kept` lives until it is complete.
  template <class T, class K = std::monostate>
  static Future<T> future(shoal_operation* operation, detail::Stored<T> value, K kept = {}) {
    if constexpr (std::is_same_v<K, std::monostate>)
      return Future<T>(std::make_shared<detail::FutureState<T>>(operation, std::move(value)));
    else
      return Future<T>(std::make_shared<detail::FutureState<T>>(operation, std::move(value), nullptr,
                                                                std::make_shared<K>(std::move(kept))));
  }

  template <class T, class K = std::monostate>
  Future<T> collective(int kind, const Views& in, const Views& out, detail::Stored<T> value, Seconds timeout,
                       ReduceOp op = sum, int root = -1, const std::vector<std::uint64_t>& sizes = {},
                       K kept = {}) const {
    const Views& all = in.empty() ? out : in;
    for (const Views* views : {&in, &out})
      for (const View& view : *views)
        if (view.dtype != all[0].dtype)
          throw UsageError("the tensors of an operation must have the same dtype");
    const std::vector<shoal_span> inputs = spans(in), outputs = spans(out);
    shoal_call call{};
    call.kind = kind;
    call.dtype = all.empty() ? 0 : static_cast<int>(all[0].dtype);
    call.op = static_cast<int>(op);
    call.root = root;
    call.count = all.empty() ? 0 : all[0].count;
    call.inputs = {inputs.data(), inputs.size()};
    call.outputs = {outputs.data(), outputs.size()};
    call.sizes = sizes.data();
    call.size_count = sizes.size();
    call.timeout = timeout.count();
    shoal_operation* operation = nullptr;
    detail::check(shoal_group_collective(get(), &call, &operation));
    return future<T>(operation, std::move(value), std::move(kept));
  }

  template <class T>
  shoal_operation* message(int kind, const T& x, const char* name, int peer, std::uint64_t tag,
                           Seconds timeout) const {
    const View view = of(x, name);
    const std::vector<std::uint64_t> shape = detail::Tensors<T>::shape(x);
    shoal_message call{};
    call.kind = kind;
    call.dtype = static_cast<int>(view.dtype);
    call.peer = peer;
    call.tag = tag;
    call.buffer = {view.data, view.bytes};
    call.dims = shape.data();
    call.dim_count = shape.size();
    call.timeout = timeout.count();
    shoal_operation* operation = nullptr;
    detail::check(shoal_group_send_or_receive(get(), &call, &operation));
    return operation;
  }

  static std::vector<shoal_span> spans(const Views& views) {
    std::vector<shoal_span> result;
    for (const View& view : views) result.push_back({view.data, view.bytes});
    return result;
  }

  std::shared_ptr<Handle> handle_;
};

/// Connects to the other processes of the job, and returns the group of all of them.
///
/// All processes of the job must call it; it returns when all are connected.  A helper process runs the
/// rendezvous, with the Python that SHOAL_PYTHON names, and keeps the membership until the last group closes.
///
/// Throws UsageError and ConfigurationError for invalid arguments and environment variables, RendezvousError
/// and RendezvousTimeout if processes contradict each other or do not come, AuthenticationError and
/// VersionMismatch for a process of another job or build.
inline Group init(const InitOptions& options = {}) {
  std::vector<std::string> words;
  const auto add = [&](const char* name, const std::string& value) {
    if (!value.empty()) words.insert(words.end(), {name, value});
  };
  words.insert(words.end(), {"name", options.name});
  add("url", options.url);
  if (options.rank) add("rank", std::to_string(*options.rank));
  if (options.size) add("size", std::to_string(*options.size));
  if (options.timeout) add("timeout", detail::number_text(options.timeout->count()));
  add("secret", options.secret);
  if (options.concurrency) add("concurrency", std::to_string(*options.concurrency));
  add("algorithm", options.algorithm);
  add("host_id", options.host_id);
  add("job", options.job);
  add("transport", options.transport);
#ifdef SHOAL_DEFAULT_PYTHON
  add("python", SHOAL_DEFAULT_PYTHON);
#endif
  std::vector<const char*> pointers;
  for (const std::string& word : words) pointers.push_back(word.c_str());
  shoal_group* group = nullptr;
  detail::check(shoal_init(pointers.data(), pointers.size(), &group));
  return Group(group);
}
/// The same at a URL.
inline Group init(const std::string& url) {
  InitOptions options;
  options.url = url;
  return init(options);
}

}  // namespace frontend
}  // namespace shoal
