// Orderly closing of a group: waits only for operations that can still be completed.
//
// A closing member announces that it submits nothing more (kLeaves).  A link preserves order, so the receiver
// of the announcement has all earlier messages: a receive without a match can no longer find one.  A message
// that waits for its receiver is cancelled when the receiver is closing too and reports that it has read
// everything (kHasRead) without granting it.  Numbered operations that a member never submits are known by
// their numbers.  Operations matched by key are waited for until the others have left.
//
// A member that has completed everything may be the one with a different call, such as a root that only
// sends.  So it stays until each other member has completed the same numbered operations (kFinished), submits
// fewer, or has left.  Until then it answers queries about its calls, and can receive kBroken.

#include <algorithm>

#include "common/clock.h"
#include "engine/context.h"

namespace shoal {

void Group::begin_close() {
  if (broken()) return;
  std::vector<int> before;  // members already closing: everything that they sent has been read
  {
    std::lock_guard lock(state_mutex_);
    if (leaving_.exchange(true)) return;
    for (int r = 0; r < size(); ++r)
      if (member(r).leaving != ~0ULL) before.push_back(r);
  }
  for (int r = 0; r < size(); ++r)
    if (r != rank()) announce_closing(r, kLeaves);
  for (int r : before) announce_closing(r, kHasRead);
  context_->bell().wake();
}

void Group::announce_closing(int rank, Closing what) {
  FrameHeader header = frame(FrameType::kGroupClosing);
  header.code = what;
  header.channel = inquiry_.next_number();
  header.message = inquiry_.history(header.channel).value_or(0);
  send_to(rank, header);
}

void Group::on_peer_closing(int rank, const FrameHeader& closing) {
  bool answer;
  {
    std::lock_guard lock(state_mutex_);
    Member& peer = member(rank);
    answer = closing.code == kLeaves && leaving_.load();
    if (closing.code == kLeaves) {
      peer.leaving = closing.channel;
      peer.history = closing.message;
      owes_answers_.store(true);
    }
    peer.has_read |= closing.code == kHasRead;
    peer.finished |= closing.code == kFinished;
  }
  if (answer) announce_closing(rank, kHasRead);
  answer_leaving();
  context_->bell().wake();
}

// Notifies closing members when this one has completed all their operations, or asks for their calls.
void Group::answer_leaving() {
  if (!has_unanswered_closings() || broken()) return;
  const auto finished = static_cast<std::uint64_t>(lanes_.last_completed() + 1);
  std::vector<std::pair<int, Member>> due;
  {
    std::lock_guard lock(state_mutex_);
    bool owes = false;
    for (int r = 0; r < size(); ++r) {
      Member& peer = member(r);
      if (r == rank() || peer.leaving == ~0ULL || peer.answered) continue;
      peer.answered = peer.leaving <= finished;
      owes |= !peer.answered;
      if (peer.answered) due.emplace_back(r, peer);
    }
    owes_answers_.store(owes);
  }
  for (const auto& [r, peer] : due) {
    const auto history = inquiry_.history(peer.leaving);
    if (peer.leaving > 0 && history && *history != peer.history)
      inquiry_.start_mismatch(peer.leaving - 1);
    else
      announce_closing(r, kFinished);
  }
}

// Whether no other member needs anything from this one.
bool Group::settled() {
  if (broken() || pairwise() || first_abandoned_.load() != ~0ULL) return true;
  const std::uint64_t submitted = inquiry_.next_number();
  std::lock_guard lock(state_mutex_);
  for (int r = 0; r < size(); ++r) {
    const Member& peer = member(r);
    if (r == rank() || peer.finished || std::min(peer.leaving, peer.left_at) < submitted) continue;
    if (submitted > 0 && peer.left_at == ~0ULL && context_->peers().state(global(r)) == Peers::kAlive)
      return false;
  }
  return true;
}

void Group::on_peer_closed(int rank, std::uint64_t next_number, Departure why) {
  agreements_.leave(rank);
  {
    std::lock_guard lock(state_mutex_);
    Member& peer = member(rank);
    if (peer.left_at == ~0ULL) {
      peer.left_at = next_number;
      peer.program_ended = why == kProgramEnded;
    }
    any_member_left_.store(true, std::memory_order_release);
  }
  context_->bell().wake();
}

bool Group::all_peers_gone() {
  std::lock_guard lock(state_mutex_);
  for (int r = 0; r < size(); ++r)
    if (r != rank() && member(r).left_at == ~0ULL && context_->peers().state(global(r)) == Peers::kAlive)
      return false;
  return true;
}

void Group::close(std::int64_t deadline) {
  begin_close();
  if (closed_.exchange(true)) return;
  while (lanes_.pending() && now_ns() < deadline) {
    Remaining remaining = Remaining::kNone;
    if (lanes_.progress(remaining)) continue;
    Doorbell::Sleeper sleeper(context_->bell(), Wake::Any);
    if (lanes_.progress(remaining) || !lanes_.pending()) continue;
    const std::int64_t pause = remaining == Remaining::kPolled ? kPollPause : 20 * kMillisecond;
    sleeper.sleep(std::min(deadline - now_ns(), pause));
  }
  while (!lanes_.pending() && !settled() && now_ns() < deadline) {
    Doorbell::Sleeper sleeper(context_->bell(), Wake::Any);
    if (settled()) break;
    sleeper.sleep(std::min(deadline - now_ns(), 20 * kMillisecond));
  }
  const std::uint64_t abandoned = std::min(first_abandoned_.load(), lanes_.first_pending());
  if (lanes_.pending()) {
    fail({ErrorCode::kClosed, "the group was closed before the operation had finished"}, false);
    Remaining remaining = Remaining::kNone;
    while (lanes_.pending()) lanes_.progress(remaining);
  }
  // A peer that does not know yet why the group broke must not take this member's leaving for the reason.
  if (auto error = failure(); error && error->code != ErrorCode::kClosed) {
    announce_failure();
    all_told_.store(true);
  }
  agreements_.close();
  FrameHeader header = frame(FrameType::kGroupClosed);
  header.code = context_->departure();
  header.channel = std::min(inquiry_.next_number(), abandoned);  // this member takes no part from here on
  send_to_all(header);
  context_->messenger().forget(ident());
  context_->drop_groups();
}

}  // namespace shoal
