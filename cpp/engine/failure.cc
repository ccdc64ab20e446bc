// How a group ends before its time: deaths, aborts, and what the peers report.

#include <algorithm>
#include <charconv>
#include <string_view>

#include "engine/context.h"
#include "engine/group.h"

namespace shoal {
namespace {

const std::string kReported = " (reported by rank ";

// The numbers of a line, separated by spaces, up to the first thing that is none.
std::vector<int> numbers(std::string_view line) {
  std::vector<int> found;
  const char* at = line.data();
  for (const char* const end = at + line.size(); at < end;) {
    int number = 0;
    const auto [next, error] = std::from_chars(at, end, number);
    if (error != std::errc{}) break;
    found.push_back(number);
    at = next;
    while (at < end && *at == ' ') ++at;
  }
  return found;
}
const std::string kGaveItUp = "; the others gave it up: ";

void add_loss(Error& error, int rank, const std::string& why) {
  error.text += (error.text.empty() ? "" : "; ") + ("rank " + std::to_string(rank)) + " is lost: " + why;
  error.ranks.push_back(rank);
}

}  // namespace

// The error of a rank that was given up, from the mark alone.
Error Group::error_of_given_up() const {
  const std::string absence = context_->peers().absence();
  Error error{ErrorCode::kPeerLost, {}, {}};
  add_loss(error, rank(), kStoppedText);
  error.text = (absence.empty() ? "this rank was stopped" : absence) + kGaveItUp + error.text;
  return error;
}

void Group::fail(Error error, bool announce) {
  // The others have cut their connections and gone on, and who gave this rank up may have died before it said
  // so: whatever is seen first, that is the cause.
  if (error.code == ErrorCode::kPeerLost && std::ranges::count(error.ranks, rank()) == 0 &&
      context_->given_up()) {
    error = error_of_given_up();
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
  if (announce) tell_failure();
  context_->bell().wake();
}

// Once the group is broken its error does not change.
void Group::tell_failure() {
  FrameHeader header = frame(FrameType::kBroken);
  header.code = static_cast<std::uint16_t>(error_.code);
  std::string text;
  for (int rank : error_.ranks) text += std::to_string(rank) + " ";
  // The others are told the loss, and not for how long this rank stood still.
  const std::size_t own = error_.text.find(kGaveItUp);
  tell_all(header, text + "\n" + error_.text.substr(own == std::string::npos ? 0 : own + kGaveItUp.size()));
}

std::optional<Error> Group::failure() {
  if (!broken()) return std::nullopt;
  std::lock_guard lock(state_mutex_);
  Error error = error_;
  error.completed = lanes_.last_completed();
  return error;
}

void Group::on_broken(int rank, ErrorCode code, const std::string& text) {
  Error error;
  error.code = code;
  const std::string_view line = std::string_view(text).substr(0, text.find('\n'));
  error.ranks = numbers(line);
  if (code == ErrorCode::kPeerLost)
    for (int lost : error.ranks) context_->peers().lost_to_others(global(lost));
  error.text = text.size() > line.size() ? text.substr(line.size() + 1) : "";
  if (code == ErrorCode::kPeerLost && std::ranges::count(error.ranks, this->rank()) > 0) {
    const std::string absence = context_->peers().absence();
    error.text =
        (absence.empty() ? "the connection to this rank was lost" : absence) + kGaveItUp + error.text;
  }
  // A table names all ranks, and an abort the one that called it.
  const bool names = code == ErrorCode::kMismatch || code == ErrorCode::kAborted;
  if (!names && error.text.find(kReported) == std::string::npos)
    error.text += kReported + std::to_string(rank) + ")";
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
      if (rank < 0 || member(rank).departed != ~0ULL) continue;  // it had closed this group
      if (error.ranks.empty()) error.code = loss.code;
      if (!member(rank).loss) member(rank).loss = loss;
      add_loss(error, rank, loss.why);
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

// Why nobody will complete a message any more, in a group of pairs that has lost members.
std::optional<Error> Group::lost_for(Operation& op) {
  const Request& request = op.request();
  if (request.peer < 0) {
    const int from = op.received ? op.received->from.load(std::memory_order_acquire) : -1;
    if (from >= 0 && lost(from)) {
      op.step();
      if (op.done()) return std::nullopt;
      context_->messenger().repost(op.received);  // others may send what it waits for
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
      add_loss(error, r, peer.loss->why);
    } else if (request.peer < 0 && peer.departed == ~0ULL) {
      return std::nullopt;  // it may still send
    }
  }
  if (error.ranks.empty()) return std::nullopt;
  return context_->given_up() ? error_of_given_up() : std::move(error);
}

// The cause of the group's end stays the first; who else has died since belongs to what the user is told.
Error Group::with_all_lost(Error error) {
  if (error.code != ErrorCode::kPeerLost) return error;
  if (std::ranges::count(error.ranks, rank()) > 0) return error;  // it is this rank that was given up
  std::lock_guard lock(state_mutex_);
  for (int r = 0; r < size(); ++r)
    if (member(r).loss && std::ranges::count(error.ranks, r) == 0) add_loss(error, r, member(r).loss->why);
  std::ranges::sort(error.ranks);
  return error;
}

}  // namespace shoal
