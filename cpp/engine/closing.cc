// How a group is closed in good order: what can still be completed is waited for, and nothing else.
//
// A member that closes tells the others that it submits nothing more (kLeaves).  A link keeps the order, so
// whoever hears that has all messages before it: a receive that has found none by then finds none.  A message
// that waits for its receiver is given up when the receiver, closing too, says that it has read it (kHasRead)
// and has granted nothing: it will not receive any more.  Numbered operations that one member never submits
// are known by their numbers.  Operations matched by key are waited for until the others have left.

#include <algorithm>
#include <limits>

#include "base/clock.h"
#include "engine/context.h"
#include "engine/messages.h"

namespace shoal {

void Group::begin_close() {
  if (broken()) return;
  std::vector<int> before;  // closing already: all that they had sent has been read
  {
    std::lock_guard lock(state_mutex_);
    if (leaving_.exchange(true)) return;
    for (int r = 0; r < size(); ++r)
      if (leaving_members_[static_cast<std::size_t>(r)].next_number != ~0ULL) before.push_back(r);
  }
  for (int r = 0; r < size(); ++r)
    if (r != rank()) tell_closing(r, kLeaves);
  for (int r : before) tell_closing(r, kHasRead);
  context_->bell().wake();
}

void Group::tell_closing(int rank, Closing what) {
  FrameHeader header = frame(FrameType::kGroupClosing);
  header.code = what;
  {
    std::lock_guard lock(recent_mutex_);
    header.channel = next_number_;
  }
  std::lock_guard lock(farewell_mutex_);
  Link* to = said_farewell_ ? nullptr : link(rank);
  if (to != nullptr && !to->broken()) to->send_control(header);
}

void Group::on_peer_closing(int rank, std::uint64_t next_number, bool has_read) {
  bool answer;
  {
    std::lock_guard lock(state_mutex_);
    Leaving& member = leaving_members_[static_cast<std::size_t>(rank)];
    answer = !has_read && leaving_.load();
    member.next_number = next_number;
    member.has_read |= has_read;
  }
  if (answer) tell_closing(rank, kHasRead);
  context_->bell().wake();
}

// A collective lacks a rank that closed the group most often because that ran out of batches before the
// others.
std::string Group::departure(int rank, const Request& request) {
  bool ended;
  {
    std::lock_guard lock(state_mutex_);
    ended = program_ended_[static_cast<std::size_t>(rank)];
  }
  std::string text = "rank " + std::to_string(rank);
  text +=
      ended ? " has left without closing the group: its program has ended" : " has closed the group and left";
  if (!request.collective()) return text;
  text +=
      ended
          ? ", and will not take part.  What it wrote tells why; if it ran out of batches before the others, "
            "the ranks have uneven inputs."
          : ", and will not take part.  Most often the ranks have uneven inputs: one runs out of batches "
            "while others go on.";
  return text + "  Give all ranks equally many, or train inside `with model.join():` (see Join)";
}

// Why nobody will complete the operation any more, now that this member closes the group, if so.
std::optional<Error> Group::in_vain(Operation& op) {
  if (auto gone = departed_for(op)) return Error{ErrorCode::kClosed, departure(*gone, op.request()), {*gone}};
  const Request& request = op.request();
  std::lock_guard lock(state_mutex_);
  auto member = [&](int r) -> const Leaving& { return leaving_members_[static_cast<std::size_t>(r)]; };
  auto leaves = [&](int r) {
    return member(r).next_number != ~0ULL || departed_[static_cast<std::size_t>(r)] != ~0ULL;
  };
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
    return Error{ErrorCode::kClosed, "all ranks close the group, and none has sent such a message", {}};
  }
  for (int r = 0; !request.keyed() && r < size(); ++r)
    if (r != rank() && member(r).next_number <= request.channel) return closing(r, " and does not take part");
  return std::nullopt;
}

// Peers would take what a later operation published for the rest of this one.
void Group::give_up_from(std::uint64_t channel) {
  std::uint64_t first = given_up_.load();
  while (channel < first && !given_up_.compare_exchange_weak(first, channel)) {
  }
}

void Group::close(std::int64_t deadline) {
  begin_close();
  if (closed_.exchange(true)) return;
  while (pending() && now_ns() < deadline) {
    bool waiting = false;
    if (progress(waiting)) continue;
    Doorbell::Sleeper sleeper(context_->bell(), Wake::Any);
    if (progress(waiting) || !pending()) continue;
    sleeper.sleep(std::min<std::int64_t>(deadline - now_ns(), 20'000'000));
  }
  std::uint64_t abandoned = given_up_.load();
  for (Lane& lane : lanes_) {
    std::lock_guard lock(lane.mutex);
    for (auto& op : lane.queue)
      if (!op->done()) abandoned = std::min(abandoned, op->request().channel);
  }
  if (pending()) {
    fail({ErrorCode::kClosed, "the group was closed before the operation had finished", {}}, false);
    bool waiting = false;
    while (pending()) progress(waiting);
  }
  // A peer that has not heard yet why the group broke must not take our leaving for the reason.
  if (auto error = failure(); error && error->code != ErrorCode::kClosed) {
    tell_failure();
    all_told_.store(true);
  }
  FrameHeader header = frame(FrameType::kGroupClosed);
  header.code = context_->departure();
  {
    std::lock_guard lock(recent_mutex_);
    header.channel = std::min(next_number_, abandoned);  // from here on we take no part
  }
  tell_all(header);
  context_->messenger().forget(ident());
  context_->drop_groups();
}

}  // namespace shoal
