#include "frontend/group.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <span>
#include <utility>

#include "collectives/calls.h"
#include "common/clock.h"
#include "engine/describe.h"
#include "frontend/blake2b.h"
#include "frontend/callbacks.h"
#include "frontend/failure.h"
#include "frontend/reports.h"
#include "kernels/types.h"
#include "net/check.h"

namespace shoal::frontend_core {
namespace {

constexpr std::uint64_t kMaxTag = 1ULL << 30;
// An empty str as Python's pickle writes it.
constexpr unsigned char kPickledNothing[] = {0x80, 0x05, 0x8c, 0x00, 0x94, 0x2e};

const char* name_of(State state) {
  constexpr const char* names[] = {"open", "closing", "closed", "aborted", "broken", "forked"};
  return names[static_cast<int>(state)];
}

std::string hex(std::uint64_t number) {
  char text[17];
  std::snprintf(text, sizeof text, "%llx", static_cast<unsigned long long>(number));
  return text;
}

std::vector<Span> spans(const shoal_spans& given) {
  std::vector<Span> result;
  for (std::size_t i = 0; i < given.count; ++i)
    result.push_back({static_cast<std::byte*>(given.data[i].data), given.data[i].bytes});
  return result;
}

bool rooted(Kind kind) {
  return kind == Kind::kReduce || kind == Kind::kBroadcast || kind == Kind::kGather || kind == Kind::kScatter;
}

shoal_call call_of(Kind kind, DType dtype, const shoal_span* in, const shoal_span* out, std::size_t outputs,
                   const std::vector<std::uint64_t>& sizes, double timeout) {
  shoal_call call{};
  call.kind = static_cast<int>(kind);
  call.dtype = static_cast<int>(dtype);
  call.root = -1;
  call.inputs = {in, 1};
  call.outputs = {out, outputs};
  call.sizes = sizes.data();
  call.size_count = sizes.size();
  call.timeout = timeout;
  return call;
}

// Reports to the launcher if other ranks caused the error.
void report_cause(const World& world, const Group& group, const Error& error) {
  if (!caused_by_others(error, group.rank())) return;
  std::vector<int> ranks;
  for (int rank : error.ranks) ranks.push_back(group.global(rank));
  world.report_told(ranks);
}

}  // namespace

ProgramGroup::ProgramGroup(std::shared_ptr<World> world, Group::Options options, double timeout,
                           bool is_first)
    : world_(std::move(world)), is_first_(is_first), timeout_(timeout) {
  for (int rank : options.ranks) options.hosts.push_back(world_->host(rank));
  options.agreements = world_->member().agreements;
  core_ = world_->context().make_group(options);
  world_->add(*this, options);
}

std::shared_ptr<ProgramGroup> ProgramGroup::of_all(const std::shared_ptr<World>& world) {
  const Member& own = world->member();
  Group::Options options;
  options.ident = own.ident;
  options.name = own.name;
  options.rank = own.context.rank;
  for (int rank = 0; rank < own.context.size; ++rank) options.ranks.push_back(rank);
  options.lanes = own.lanes;
  options.algorithm = static_cast<Algorithm>(own.algorithm);
  return std::shared_ptr<ProgramGroup>(new ProgramGroup(world, std::move(options), own.timeout, true));
}

ProgramGroup::~ProgramGroup() {
  try {
    close(0);
  } catch (const Failure&) {  // an operation has raised it, or nobody asked for its result
  }
}

// -- operations -----------------------------------------------------------------------------------

double ProgramGroup::checked(double timeout) const {
  if (timeout == 0) return timeout_;
  if (!(timeout > 0))
    throw Failure{"UsageError", "timeout=" + std::to_string(timeout) + " on rank " + std::to_string(rank()) +
                                    ": expected a positive number of seconds"};
  return timeout;
}

void ProgramGroup::refuse(const std::string& operation, const std::string& why) const {
  throw Failure{"UsageError",
                operation + " on rank " + std::to_string(rank()) + " of group '" + name() + "': " + why};
}

ProgramOperation ProgramGroup::submit(const shoal_call& call) {
  const auto kind = static_cast<Kind>(call.kind);
  const auto dtype = static_cast<DType>(call.dtype);
  const auto op = static_cast<RedOp>(call.op);
  Request request =
      collective_request(*core_, kind, dtype, op, 0, rooted(kind) ? call.root : -1, checked(call.timeout));
  request.in = spans(call.inputs);
  request.out = spans(call.outputs);
  request.sizes.assign(call.sizes, call.sizes + call.size_count);
  // Sizes that must be equal on all ranks: one count of elements, or a list of sizes.
  if (!request.sizes.empty() && std::ranges::count(request.sizes, request.sizes[0]) ==
                                    static_cast<std::ptrdiff_t>(request.sizes.size())) {
    request.count = request.sizes[0];
    request.sizes.clear();
  } else if (kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kBroadcast) {
    request.count = call.count;
  }
  if (call.kind < static_cast<int>(Kind::kAllReduce) || call.kind > static_cast<int>(Kind::kBarrier) ||
      itemsize(dtype) == 0)
    refuse("collective", "unknown operation or dtype");
  const std::string what = shoal::name(kind);
  if (reduces(kind) && !legal(dtype, op))
    throw Failure{"UnsupportedOperation", what + " on rank " + std::to_string(rank()) + " of group '" +
                                              name() + "': " + shoal::name(op) + " is not defined for " +
                                              shoal::name(dtype)};
  if (rooted(kind) && (call.root < 0 || call.root >= size()))
    refuse(what, "root " + std::to_string(call.root) + " is not a rank of the group, which has " +
                     std::to_string(size()));
  // Operations that write only what they have read may have an input and an output at the same place.
  if (overlapping(request, kind != Kind::kAllToAll && kind != Kind::kReduceScatter))
    refuse(what, "tensors that are read and written share memory; pass a copy of the one that is read");
  return go(std::move(request), true);
}

ProgramOperation ProgramGroup::submit(const shoal_message& message) {
  const auto kind = static_cast<Kind>(message.kind);
  const bool sends = kind == Kind::kSend;
  if (!sends && kind != Kind::kRecv) refuse("message", "unknown operation");
  const double timeout = checked(message.timeout);
  const std::string what = sends ? "send" : "recv";
  if (message.dim_count > kMaxDims) refuse(what, "a message has at most 8 dimensions");
  const std::span dims(message.dims, message.dim_count);
  Request request =
      message_request(kind, static_cast<DType>(message.dtype), dims, message.peer, message.tag, timeout);
  (sends ? request.in : request.out) = {{static_cast<std::byte*>(message.buffer.data), message.buffer.bytes}};
  if (const char* flaw = sends ? flaw_of_shape(request.shape, message.buffer.bytes) : nullptr)
    refuse(what, std::string("cannot send ") + flaw);
  if (message.peer == rank()) refuse(what, "a rank cannot send messages to itself");
  if (message.peer >= size() || message.peer < (sends ? 0 : -1))
    refuse(what,
           std::to_string(message.peer) + " is not a rank of the group, which has " + std::to_string(size()));
  if (message.tag >= kMaxTag) refuse(what, "a tag is at most 2^30 - 1, got " + std::to_string(message.tag));
  return go(std::move(request), false);
}

ProgramOperation ProgramGroup::go(Request request, bool numbered) {
  CallbackScope* scope = numbered ? CallbackScope::current() : nullptr;
  const std::unique_lock<std::mutex> lock = lock_usable();
  std::uint64_t key = 0;
  if (scope != nullptr) {
    key = scope->next_key();
    request.channel = kKeyed | (key & (kKeyed - 1));
  } else if (numbered) {
    request.channel = number_;
    key = future_key(core_->ident(), number_);
  }
  OperationPtr operation = core_->submit(std::move(request));
  if (numbered && scope == nullptr) ++number_;
  return {world_, std::move(operation), key, reported_};
}

bool wait(const ProgramOperation& waiting, std::int64_t until) {
  Operation& operation = *waiting.operation;
  if (!operation.done() && !operation.orphaned() && !waiting.world->context().wait(operation, until))
    return false;
  Error error = operation.error();
  if (error.code == ErrorCode::kNone) return true;
  Group& group = operation.group();
  if (error.code == ErrorCode::kPeerLost) {
    group.context().look_for_deaths();
    error = group.with_all_lost(std::move(error));
  }
  report_cause(*waiting.world, group, error);
  if (group.broken()) *waiting.reported = true;
  throw failure_of(error, group.rank(), group.name());
}

State ProgramGroup::state() {
  if (world_->forked()) return State::kForked;
  const std::lock_guard lock(mutex_);
  if (local_ != State::kOpen) return local_;
  const auto failure = failure_of_group();
  if (!failure) return State::kOpen;
  return failure->code == ErrorCode::kAborted ? State::kAborted : State::kBroken;
}

std::optional<Error> ProgramGroup::failure_of_group() {
  std::optional<Error> failure = core_->failure();
  if (!failure) return failure;
  if (failure->code == ErrorCode::kPeerLost) failure = core_->with_all_lost(std::move(*failure));
  report_cause(*world_, *core_, *failure);
  return failure;
}

std::unique_lock<std::mutex> ProgramGroup::lock_usable() {
  const auto where = [this] { return "group '" + name() + "' on rank " + std::to_string(rank()); };
  // Before the lock, which another thread of the parent may have held.
  if (world_->forked())
    throw Failure{"ForkedProcess", where() +
                                       " was used in a forked child of the process that made it; fork "
                                       "before shoal::init()"};
  std::unique_lock<std::mutex> lock(mutex_);
  if (local_ == State::kClosing || local_ == State::kClosed)
    throw Failure{"GroupClosed", where() + " is " + name_of(local_) + "; make a new group to go on"};
  if (const auto failure = failure_of_group()) {
    *reported_ = true;
    Failure raised = failure_of(*failure, rank(), name());
    raised.message =
        where() + (failure->code == ErrorCode::kAborted ? " was aborted: " : " is broken: ") + raised.message;
    throw raised;
  }
  if (local_ == State::kAborted)
    throw Failure{"GroupAborted", where() + " was aborted here: " + abort_reason_};
  return lock;
}

// -- groups and memory ----------------------------------------------------------------------------

std::shared_ptr<ProgramGroup> ProgramGroup::split(const std::int64_t* color, std::int64_t key,
                                                  double timeout) {
  struct Row {
    std::int64_t joins, color, key, options;
  };
  const double seconds = checked(timeout);
  // The last column is a digest of the options that Python's split takes; there are none here.
  const Row mine{color != nullptr, color == nullptr ? 0 : *color, key,
                 static_cast<std::int64_t>(digest64(""))};
  std::vector<Row> rows(size());
  const auto count = static_cast<std::uint64_t>(size());
  const shoal_span in{const_cast<Row*>(&mine), sizeof mine}, out{rows.data(), rows.size() * sizeof(Row)};
  const ProgramOperation exchange = submit(
      call_of(Kind::kAllGather, DType::kInt64, &in, &out, 1, std::vector<std::uint64_t>(count, 4), seconds));
  wait(exchange, kNever);
  std::map<std::int64_t, std::int64_t> chosen;  // by color
  std::vector<std::int64_t> differing;
  for (const Row& row : rows)
    if (row.joins && chosen.emplace(row.color, row.options).first->second != row.options)
      differing.push_back(row.color);
  if (!differing.empty()) {
    // The others exchange their options as pickled texts; see subgroups.split and objects.all_gather.
    std::vector<std::int64_t> sizes(rows.size());
    const std::int64_t bytes = sizeof kPickledNothing;
    const shoal_span own{const_cast<std::int64_t*>(&bytes), sizeof bytes},
        all{sizes.data(), sizes.size() * sizeof bytes};
    const ProgramOperation lengths = submit(call_of(Kind::kAllGather, DType::kInt64, &own, &all, 1,
                                                    std::vector<std::uint64_t>(count, 1), seconds));
    wait(lengths, kNever);
    std::vector<std::string> texts;
    std::vector<shoal_span> parts;
    for (std::int64_t length : sizes) texts.emplace_back(static_cast<std::size_t>(length), '\0');
    for (std::string& text : texts) parts.push_back({text.data(), text.size()});
    const shoal_span pickled{const_cast<unsigned char*>(kPickledNothing), sizeof kPickledNothing};
    const CallbackScope scope(lengths.key, 0);
    wait(submit(call_of(Kind::kAllGather, DType::kUInt8, &pickled, parts.data(), parts.size(),
                        std::vector<std::uint64_t>(sizes.begin(), sizes.end()), seconds)),
         kNever);
  }
  if (color == nullptr) return nullptr;
  if (std::ranges::count(differing, *color) > 0)
    refuse("split", "the ranks of color " + std::to_string(*color) +
                        " asked for different groups: this rank gave no options, but another rank did");
  std::vector<std::pair<std::int64_t, int>> ordered;
  for (std::size_t rank = 0; rank < rows.size(); ++rank)
    if (rows[rank].joins && rows[rank].color == *color)
      ordered.emplace_back(rows[rank].key, static_cast<int>(rank));
  std::ranges::sort(ordered);
  // The key of the exchange is unique to this split, and equal on all ranks.
  const std::string label = "split:" + hex(exchange.key) + ":" + std::to_string(*color);
  Group::Options options;
  options.ident = digest64(hex(core_->ident()) + "/" + label);
  options.name = name() + "/" + label;
  for (const auto& [_, member] : ordered) {
    if (member == rank()) options.rank = static_cast<int>(options.ranks.size());
    options.ranks.push_back(core_->global(member));
  }
  options.lanes = core_->lane_count();
  options.algorithm = core_->algorithm();
  return std::shared_ptr<ProgramGroup>(new ProgramGroup(world_, std::move(options), seconds, false));
}

std::shared_ptr<Block> ProgramGroup::allocate(std::uint64_t bytes) {
  lock_usable().unlock();
  return core_->allocate(bytes);
}

// -- the end --------------------------------------------------------------------------------------

void ProgramGroup::abort(const std::string& reason) {
  if (world_->forked()) return;
  {
    const std::lock_guard lock(mutex_);
    if (local_ != State::kOpen && local_ != State::kClosing) return;
    if (local_ == State::kOpen && !core_->failure()) {
      local_ = State::kAborted;
      abort_reason_ = reason;
    }
  }
  report_left();
  core_->abort(reason);
}

bool ProgramGroup::begin_close() {
  {
    const std::lock_guard lock(mutex_);
    if (local_ == State::kClosed) return false;
    local_ = State::kClosing;
  }
  if (is_first_) report_left();
  core_->begin_close();
  return true;
}

void ProgramGroup::close(double timeout) {
  if (world_->forked()) return;
  const std::int64_t deadline = until(checked(timeout));
  const std::lock_guard closing(closing_);
  if (!begin_close()) return;
  core_->close(deadline);
  const auto failure = core_->failure();
  {
    const std::lock_guard lock(mutex_);
    local_ = State::kClosed;
  }
  world_->remove(*this, deadline);
  if (failure && failure->code == ErrorCode::kMismatch && !*reported_)
    throw Failure{"CollectiveMismatch",
                  "group '" + name() + "' on rank " + std::to_string(rank()) +
                      " failed while it was closed: " + explain(*failure, rank(), name())};
}

}  // namespace shoal::frontend_core
