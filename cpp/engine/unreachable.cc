// Detection of operations that can no longer complete, because a peer that they wait for failed or leaves.

#include "engine/context.h"
#include "engine/group.h"
#include "engine/messages.h"

namespace shoal {
namespace {

// Whether the operation completes with what is there.  The thread that wrote the last bytes of a send may not
// have recorded it yet, and the receiver may have left since.
bool ends_now(Operation& op) {
  op.step();
  if (!op.done() && op.request().kind == Kind::kSend && Messages::written(op)) op.step();
  return op.done();
}

}  // namespace

void Group::fail_if_unreachable(Operation& op) {
  if (op.ending()) {
    op.step();
    if (op.done()) return;
    // A message that needs only this rank's buffers still gets through.
    if (op.request().kind == Kind::kSend && Messages::release_sends(op)) op.step();
    if (!op.done()) op.fail(op.cause_);
    return;
  }
  if (broken()) {
    if (!ends_now(op)) op.fail(*failure());
    return;
  }
  if (any_lost_.load(std::memory_order_acquire)) {
    if (auto error = lost_for(op)) {
      if (!ends_now(op)) op.fail(std::move(*error));
      return;
    }
  }
  if (leaving_.load(std::memory_order_acquire)) {
    // Other operations of the group may still complete, so only this one fails.
    if (auto error = closing_for(op)) {
      if (ends_now(op)) return;
      if (op.request().numbered()) abandon_from(op.request().channel);
      op.fail(std::move(*error));
    }
    return;
  }
  if (!any_member_left_.load(std::memory_order_acquire)) return;
  if (auto rank = missing_member_for(op)) {
    if (ends_now(op)) return;
    Error error = departure(*rank, op.request());
    if (pairwise()) return op.fail(std::move(error));
    fail(std::move(error), true);
    op.fail(*failure());
  }
}

std::optional<int> Group::missing_member_for(Operation& op) {
  std::lock_guard lock(state_mutex_);
  const Request& request = op.request();
  auto is_gone = [&](int rank) { return member(rank).left_at != ~0ULL; };
  if (request.kind == Kind::kSend) return is_gone(request.peer) ? std::optional(request.peer) : std::nullopt;
  if (request.kind == Kind::kRecv && request.peer < 0) {
    if (op.received)
      if (const int source = op.received->from.load(std::memory_order_acquire); source >= 0)
        return is_gone(source) ? std::optional(source) : std::nullopt;  // the rest will not arrive
    int last = -1;
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      if (!is_gone(r)) return std::nullopt;
      last = r;
    }
    return last < 0 ? std::nullopt : std::optional(last);
  }
  if (request.kind == Kind::kRecv || request.keyed()) {
    for (int source : Messages::sources_of(op))
      if (is_gone(source)) return source;
    return std::nullopt;
  }
  for (int r = 0; r < size(); ++r)
    if (r != rank() && member(r).left_at <= request.channel) return r;
  return std::nullopt;
}

// A rank that closed the group before a collective has most often run out of batches before the others.
Error Group::departure(int rank, const Request& request) {
  bool ended;
  {
    std::lock_guard lock(state_mutex_);
    ended = member(rank).program_ended;
  }
  std::string text = "rank " + std::to_string(rank);
  text +=
      ended ? " has left without closing the group: its program has ended" : " has closed the group and left";
  if (!request.collective()) return {ErrorCode::kClosed, text, {rank}};
  text +=
      ended
          ? ", and will not take part.  What it wrote tells why; if it ran out of batches before the others, "
            "the ranks have uneven inputs."
          : ", and will not take part.  Most often the ranks have uneven inputs: one runs out of batches "
            "while others go on.";
  text += "  Give all ranks equally many, or train inside `with model.join():` (see Join)";
  return {ErrorCode::kClosed, text, {rank}};
}

// The reason why an operation can no longer complete while this member closes the group, if any.
std::optional<Error> Group::closing_for(Operation& op) {
  if (auto gone = missing_member_for(op)) return departure(*gone, op.request());
  const Request& request = op.request();
  std::lock_guard lock(state_mutex_);
  auto leaves = [&](int r) { return member(r).leaving != ~0ULL || member(r).left_at != ~0ULL; };
  auto closing = [&](int r, const char* so) {
    return Error{ErrorCode::kClosed, "rank " + std::to_string(r) + " closes the group too" + so, {r}};
  };
  if (request.kind == Kind::kSend) {
    if (!member(request.peer).has_read || !Messages::ungranted(op)) return std::nullopt;
    return closing(request.peer, " and does not receive the message");
  }
  if (request.kind == Kind::kRecv) {
    if (!op.received || op.received->state.load(std::memory_order_acquire) != Incoming::kPosted)
      return std::nullopt;
    if (request.peer >= 0)
      return leaves(request.peer) ? std::optional(closing(request.peer, " and has sent no such message"))
                                  : std::nullopt;
    for (int r = 0; r < size(); ++r)
      if (r != rank() && !leaves(r)) return std::nullopt;
    return Error{ErrorCode::kClosed, "all ranks close the group, and none has sent such a message"};
  }
  for (int r = 0; !request.keyed() && r < size(); ++r)
    if (r != rank() && member(r).leaving <= request.channel) return closing(r, " and does not take part");
  return std::nullopt;
}

// Peers would mistake data published by a later operation for the rest of this one.
void Group::abandon_from(std::uint64_t channel) {
  std::uint64_t first = first_abandoned_.load();
  while (channel < first && !first_abandoned_.compare_exchange_weak(first, channel)) {
  }
}

}  // namespace shoal
