// Failures of a group: losses, aborts, and reports of peers.

#include <algorithm>

#include "engine/context.h"
#include "engine/group.h"

namespace shoal {

// The error of an evicted rank, from its mark alone.
Error Group::eviction_error() const {
  Error error;
  error.code = ErrorCode::kPeerLost;
  error.add({rank(), kStoppedText});
  error.absence = context_->peers().absence();
  if (error.absence.empty()) error.absence = "this rank was stopped";
  return error;
}

void Group::fail(Error error, bool announce) {
  // If this rank was evicted, that is the cause, whatever is seen first: its peers have cut their
  // connections, and the rank that evicted it may have died before reporting it.
  if (error.code == ErrorCode::kPeerLost && !error.blames(rank()) && context_->evicted()) {
    error = eviction_error();
    announce = false;
  }
  {
    std::lock_guard lock(state_mutex_);
    if (broken()) return;
    error_ = std::move(error);
    for (auto& entry : blocks_)
      if (auto block = entry.lock(); block && team_) context_->quarantine().hold(ident(), block->data());
    if (team_) team_->quarantine();
    broken_.store(true, std::memory_order_release);
  }
  inquiry_.stop();
  if (announce) announce_failure();
  context_->bell().wake();
}

void Group::abort(const std::string& reason) {
  const std::string text = "rank " + std::to_string(rank()) + " aborted the group";
  fail({ErrorCode::kAborted, text + (reason.empty() ? "" : ": " + reason), {rank()}}, true);
}

// The error of a broken group does not change.
void Group::announce_failure() {
  FrameHeader header = frame(FrameType::kBroken);
  header.code = static_cast<std::uint16_t>(error_.code);
  send_to_all(header, encode(error_));
}

std::optional<Error> Group::failure() {
  if (!broken()) return std::nullopt;
  std::lock_guard lock(state_mutex_);
  Error error = error_;
  error.completed = lanes_.last_completed();
  return error;
}

void Group::on_broken(int rank, Error error) {
  for (LostRank& loss : error.lost)
    if (loss.reporter < 0) loss.reporter = rank;
  if (error.reporter < 0) error.reporter = rank;
  if (error.code == ErrorCode::kPeerLost) {
    for (int lost : error.ranks) context_->peers().lost_to_others(global(lost));
    if (error.blames(this->rank())) {
      error.absence = context_->peers().absence();
      if (error.absence.empty()) error.absence = "the connection to this rank was lost";
    }
  }
  fail(std::move(error), false);
}

bool Group::on_peers_lost(const std::vector<Loss>& losses) {
  for (const Loss& loss : losses)
    if (const int rank = rank_of(loss.peer); rank >= 0) agreements_.lose(rank, loss.dead);
  Error error;
  {
    std::lock_guard lock(state_mutex_);
    for (const Loss& loss : losses) {
      const int rank = rank_of(loss.peer);
      if (rank < 0 || member(rank).left_at != ~0ULL) continue;  // it had closed this group
      if (error.ranks.empty()) error.code = loss.code;
      if (!member(rank).loss) member(rank).loss = loss;
      error.add({rank, loss.why});
    }
    if (pairwise() && !error.ranks.empty()) any_lost_.store(true, std::memory_order_release);
  }
  if (error.ranks.empty()) return false;
  if (!pairwise()) fail(std::move(error), !closed());
  context_->bell().wake();
  return pairwise();
}

bool Group::lost(int rank) {
  if (!any_lost_.load(std::memory_order_acquire)) return false;
  std::lock_guard lock(state_mutex_);
  return member(rank).loss.has_value();
}

// The reason why a message can no longer be completed, in a pairwise group that has lost members.
std::optional<Error> Group::lost_for(Operation& op) {
  const Request& request = op.request();
  if (request.peer < 0) {
    const int from = op.received ? op.received->from.load(std::memory_order_acquire) : -1;
    if (from >= 0 && lost(from)) {
      op.step();
      if (op.done()) return std::nullopt;
      context_->messenger().repost(op.received, from);  // another member may send a match
    }
  }
  std::lock_guard lock(state_mutex_);
  Error error;
  error.code = ErrorCode::kPeerLost;
  for (int r = 0; r < size(); ++r) {
    if (r == rank() || (request.peer >= 0 && r != request.peer)) continue;
    const Member& peer = member(r);
    if (peer.loss) {
      error.code = peer.loss->code;
      error.add({r, peer.loss->why});
    } else if (request.peer < 0 && peer.left_at == ~0ULL) {
      return std::nullopt;  // it may still send
    }
  }
  if (error.ranks.empty()) return std::nullopt;
  return context_->evicted() ? eviction_error() : std::move(error);
}

// Keeps the first cause of the group's failure, and adds members lost since then.
Error Group::with_all_lost(Error error) {
  if (error.code != ErrorCode::kPeerLost) return error;
  if (error.blames(rank())) return error;  // this rank was evicted
  std::lock_guard lock(state_mutex_);
  for (int r = 0; r < size(); ++r)
    if (member(r).loss && !error.blames(r)) error.add({r, member(r).loss->why});
  std::ranges::sort(error.ranks);
  return error;
}

}  // namespace shoal
