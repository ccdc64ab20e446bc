#include "engine/operation.h"

#include <sched.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "common/clock.h"
#include "engine/context.h"
#include "engine/describe.h"
#include "engine/group.h"

namespace shoal {
namespace {

constexpr std::int64_t kStall = kSecond;
constexpr std::uint64_t kLarge = (4 << 20) + 1;

static_assert(Fingerprint::kAlgorithms == kAlgorithms);
static_assert(kAlgorithms - 1 <= 0xFF >> Fingerprint::kAlgorithmShift);

Fingerprint fingerprint(const Request& request, const Group& group) {
  Fingerprint call;
  call.lanes = static_cast<std::uint8_t>(std::min<int>(group.lane_count(), Fingerprint::kMaxLanes) |
                                         static_cast<int>(group.algorithm()) << Fingerprint::kAlgorithmShift);
  call.kind = static_cast<std::uint8_t>(request.kind);
  if (request.on_device) call.kind |= Fingerprint::kOnDevice;
  call.dtype = static_cast<std::uint8_t>(request.reduction.dtype);
  call.op = static_cast<std::uint8_t>(request.reduction.op);
  call.root = request.root;
  call.count = request.count;
  if (!request.sizes.empty()) {
    std::uint64_t hash = 0xcbf29ce484222325ULL;
    for (std::uint64_t bytes : request.sizes) hash = (hash ^ bytes) * 0x100000001b3ULL;
    call.sizes = hash | 1;
  }
  return call;
}

}  // namespace

Operation::Operation(std::shared_ptr<Group> group, Request request)
    : group_(std::move(group)),
      request_(std::move(request)),
      call_(fingerprint(request_, *group_)),
      bytes_(std::max(total(request_.in), total(request_.out))),
      large_(bytes_ >= kLarge),
      submitted_(now_ns()),
      deadline_(submitted_ + request_.timeout),
      ask_at_(submitted_ + kStall) {}

Operation::~Operation() = default;

bool Operation::notify_with(std::int64_t ticket) {
  ticket_ = ticket;
  if (state_.fetch_or(kAnnounceBit, std::memory_order_acq_rel) & kDoneBit) return true;
  group_->context().submitted(true);  // no thread drives it by waiting, but one needs its completion
  return false;
}

bool Operation::step() {
  if (done()) return false;
  bool moved = false;
  if (!task_.handle()) {
    // An earlier operation may have been cancelled between two phases.  Members that do not know yet why the
    // group broke would mistake this operation's data for the rest of it, and for a mismatch.
    if (request_.collective() && group_->broken()) return false;
    if (request_.kind == Kind::kSend && group_->lost(request_.peer)) return false;
    if (group_->is_abandoned(request_)) return false;
    if (group_->context().trace().on()) [[unlikely]]
      begun_ = now_ns();
    task_ = request_.algorithm(*this);
    resume_ = task_.handle();
    moved = true;
    resume_.resume();
  }
  while (!task_.finished()) {
    if (beginning_) return moved;
    if (!waiting_for_->ready()) {
      if (waits_since() == 0 && waiting_for_->type == Condition::Type::kArrival)
        waits_since_.store(now_ns(), std::memory_order_relaxed);
      return moved;
    }
    if (waits_since() != 0) end_wait();
    if (blocker() >= 0) set_blocker(-1);
    moved = true;
    resume_.resume();
  }
  try {
    task_.rethrow();
  } catch (const InvalidPeerData& flaw) {
    group_->fail({ErrorCode::kWire, "rank " + std::to_string(flaw.rank) + " " + flaw.what(), {flaw.rank}},
                 true);
    return true;
  } catch (const MoverFailed& error) {
    group_->abort(error.what());
    return true;
  } catch (const std::exception& error) {  // out of memory: the peers wait in vain
    Error lack{ErrorCode::kOutOfMemory, error.what(), {group_->rank()}};
    if (group_->pairwise())
      end(std::move(lack));
    else
      group_->fail(std::move(lack), true);
    return true;  // Group::fail_if_unreachable fails the operation
  }
  complete();
  return true;
}

bool Operation::overdue(std::int64_t now, std::int64_t& next) const {
  if (deadline_ <= now) return true;
  next = std::min(next, deadline_);
  return false;
}

bool Operation::is_stalled(std::int64_t now, std::int64_t& next) {
  if (!request_.collective()) return false;
  const bool is_stalled = ask_at_ <= now;
  if (is_stalled) ask_at_ = std::numeric_limits<std::int64_t>::max();
  next = std::min(next, ask_at_);
  return is_stalled;
}

bool Operation::begin() {
  if (task_.handle()) return false;
  beginning_ = true;
  bool moved = step();
  beginning_ = false;
  return moved;
}

void Operation::end_wait() {
  called_ = now_ns();
  const std::int64_t since = waits_since();
  group_->lanes().statistics(*this).waited(other_blocker(), called_ - since);
  if (waited_since_ == 0) waited_since_ = since;
  waits_since_.store(0, std::memory_order_relaxed);
  last_to_call_ = blocker();
}

int Operation::other(int rank) const { return rank == group_->rank() ? -1 : rank; }

void Operation::complete() {
  if (error_.code == ErrorCode::kNone) group_->context().reached(Fault::kFinished);
  task_.reset();
  if (waits_since() != 0) end_wait();
  ended_ = now_ns();
  group_->lanes().statistics(*this).ended(error_.code != ErrorCode::kNone, bytes_, ended_ - submitted_,
                                          other(last_to_call_));
  if (Trace& trace = group_->context().trace(); trace.on()) [[unlikely]] {
    const bool failed = error_.code != ErrorCode::kNone;
    trace.add(
        {.group = group_->ident(),
         .channel = request_.channel & ~kKeyed,
         .submitted = submitted_,
         .begun = begun_,
         .waited = waited_since_,
         .called = called_,
         .ended = ended_,
         .bytes = bytes_,
         .last = other(last_to_call_),
         .peer = received && !failed ? static_cast<std::int32_t>(received->header.source) : request_.peer,
         .kind = request_.kind,
         .failed = failed,
         .keyed = request_.keyed()});
  }
  if (request_.numbered() && error_.code == ErrorCode::kNone) group_->lanes().completed(*this);
  if (state_.fetch_or(kDoneBit, std::memory_order_acq_rel) & kAnnounceBit)
    group_->context().tickets().add(ticket_);
  group_->context().bell().ring();
}

void Operation::fail(Error error) {
  if (done()) return;
  error.completed = group_->lanes().last_completed();
  error.operation = describe(request_);
  error_ = std::move(error);
  // A member that resumes late may still write its slice to this memory.
  const Arena& arena = *group_->context().arena();
  for (const auto* spans : {&request_.in, &request_.out})
    for (const Span& span : *spans)
      if (request_.numbered() && group_->team() != nullptr && span.bytes > 0 &&
          arena.contains(span.data, span.bytes))
        group_->context().quarantine().hold(group_->ident(), span.data);
  complete();
}

void Operation::end(Error error) {
  int none = 0;
  if (!ending_.compare_exchange_strong(none, kClaimed)) return;
  cause_ = std::move(error);
  ending_.store(kEnding, std::memory_order_release);
}

bool Operation::cancel() {
  if (request_.collective() || done() || group_->context().forked()) return false;
  end({ErrorCode::kCancelled, "was cancelled here", {}, describe(request_)});
  while (!done())
    if (!group_->lanes().drive(*this)) sched_yield();  // another thread holds the token
  return error_.code == ErrorCode::kCancelled;
}

void Operation::abandon() {
  abandoned_.store(true, std::memory_order_release);
  group_->abandoned_.store(true, std::memory_order_release);
}

void Operation::finish_external() {
  finished_externally_.store(true, std::memory_order_release);
  group_->lanes().drive(*this);
}

bool Operation::orphaned() {
  if (done() || !group_->context().forked()) return false;
  error_ = {ErrorCode::kForked,
            describe(request_) + " of group '" + group_->name() +
                "' belongs to the process that this one was forked from; wait for it there",
            {}};
  state_.fetch_or(kDoneBit, std::memory_order_acq_rel);  // keep the coroutine: it owns the parent's resources
  return true;
}

std::shared_ptr<std::byte> Operation::scratch(std::uint64_t bytes) {
  return group_->context().buffers().scratch(bytes);
}

Task Operation::mismatch() {
  group_->inquiry().start_mismatch(request_.channel);
  co_await never();
}

}  // namespace shoal
