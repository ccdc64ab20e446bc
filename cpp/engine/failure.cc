// How a group ends before its time: deaths, mismatches, timeouts, aborts, and finding out who is to blame.

#include <algorithm>
#include <cstdio>
#include <sstream>

#include "base/clock.h"
#include "engine/context.h"
#include "engine/group.h"

namespace shoal {
namespace {

constexpr std::int64_t kInquiryTime = 400'000'000;  // how long peers may take to say what they called

const std::string kReported = " (reported by rank ";

const char* kind_name(std::uint8_t kind) {
  static const char* const names[] = {"?",          "all_reduce",     "reduce", "broadcast",
                                      "all_gather", "reduce_scatter", "gather", "scatter",
                                      "all_to_all", "barrier",        "send",   "recv"};
  return kind < 12 ? names[kind] : names[0];
}

bool reduces(std::uint8_t kind) {
  return kind == static_cast<std::uint8_t>(Kind::kAllReduce) ||
         kind == static_cast<std::uint8_t>(Kind::kReduce) ||
         kind == static_cast<std::uint8_t>(Kind::kReduceScatter);
}

void add_loss(Error& error, int rank, const std::string& why) {
  error.text += (error.text.empty() ? "" : "; ") + ("rank " + std::to_string(rank)) + " is lost: " + why;
  error.ranks.push_back(rank);
}

}  // namespace

std::string seconds(std::int64_t nanoseconds) {
  // Three digits matter, but no time is shown as 1.8e+03 s.
  const double time = static_cast<double>(nanoseconds) / 1e9;
  char text[32];
  std::snprintf(text, sizeof text, time < 100 ? "%.3g s" : "%.0f s", time);
  return text;
}

std::string describe(const Fingerprint& call) {
  std::ostringstream out;
  out << kind_name(call.kind) << '(';
  if (call.kind != static_cast<std::uint8_t>(Kind::kBarrier)) {
    out << shoal::name(static_cast<DType>(call.dtype));
    if (call.count > 0 || call.sizes == 0) out << '[' << call.count << ']';
    if (call.sizes != 0) {
      char hash[24];
      std::snprintf(hash, sizeof hash, " sizes#%08x", static_cast<unsigned>(call.sizes));
      out << hash;
    }
    if (reduces(call.kind)) out << ", op=" << shoal::name(static_cast<RedOp>(call.op));
    if (call.root >= 0) out << ", root=" << call.root;
  }
  out << ')';
  return out.str();
}

std::string describe(const Request& request) {
  std::string name = kind_name(static_cast<std::uint8_t>(request.kind));
  if (request.collective()) {
    if (request.keyed()) return name + " issued in a callback";
    return name + " (operation " + std::to_string(request.channel) + ")";
  }
  std::string peer = request.peer < 0 ? "any rank" : "rank " + std::to_string(request.peer);
  return name + (request.kind == Kind::kSend ? " to " : " from ") + peer + " (tag " +
         std::to_string(request.tag) + ")";
}

void Group::fail(Error error, bool announce) {
  {
    std::lock_guard lock(state_mutex_);
    if (broken()) return;
    error_ = std::move(error);
    inquiry_.reset();
    for (auto& entry : blocks_)
      if (auto block = entry.lock()) block->quarantine();
    if (team_) team_->quarantine();
    broken_.store(true, std::memory_order_release);
  }
  if (announce) tell_failure();
  context_->bell().wake();
}

// Once the group is broken its error does not change.
void Group::tell_failure() {
  FrameHeader header = frame(FrameType::kBroken);
  header.code = static_cast<std::uint16_t>(error_.code);
  std::string text;
  for (int rank : error_.ranks) text += std::to_string(rank) + " ";
  tell_all(header, text + "\n" + error_.text);
}

void Group::on_broken(int rank, ErrorCode code, const std::string& text) {
  Error error;
  error.code = code;
  std::istringstream in(text);
  std::string line;
  std::getline(in, line);
  std::istringstream ranks(line);
  for (int r; ranks >> r;) error.ranks.push_back(r);
  if (code == ErrorCode::kPeerLost)
    for (int lost : error.ranks) context_->lost_to_others(global(lost));
  error.text = text.size() > line.size() ? text.substr(line.size() + 1) : "";
  if (code == ErrorCode::kPeerLost && std::ranges::count(error.ranks, this->rank()) > 0) {
    const std::string absence = context_->absence();
    error.text = (absence.empty() ? "the connection to this rank was lost" : absence) +
                 "; the others gave it up: " + error.text;
  }
  // A table names all ranks, and an abort the one that called it.
  const bool names = code == ErrorCode::kMismatch || code == ErrorCode::kAborted;
  if (!names && error.text.find(kReported) == std::string::npos)
    error.text += kReported + std::to_string(rank) + ")";
  fail(std::move(error), false);
}

bool Group::on_peers_lost(const std::vector<Loss>& losses) {
  Error error;
  {
    std::lock_guard lock(state_mutex_);
    for (const Loss& loss : losses) {
      const int rank = rank_of(loss.peer);
      if (rank < 0 || departed_[static_cast<std::size_t>(rank)] != ~0ULL)
        continue;  // it had closed this group
      if (error.ranks.empty()) error.code = loss.code;
      lost_.emplace(rank, loss);
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
  return lost_.contains(rank);
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
  for (const auto& [rank, loss] : lost_) {
    if (request.peer >= 0 && rank != request.peer) continue;
    error.code = loss.code;
    add_loss(error, rank, loss.why);
  }
  if (request.peer < 0)
    for (int r = 0; r < size(); ++r)
      if (r != rank() && !lost_.contains(r) && departed_[static_cast<std::size_t>(r)] == ~0ULL)
        return std::nullopt;
  return error.ranks.empty() ? std::nullopt : std::optional(std::move(error));
}

// The cause of the group's end stays the first; who else has died since belongs to what the user is told.
Error Group::with_all_lost(Error error) {
  if (error.code != ErrorCode::kPeerLost) return error;
  if (std::ranges::count(error.ranks, rank()) > 0) return error;  // it is this rank that was given up
  std::lock_guard lock(state_mutex_);
  for (const auto& [rank, loss] : lost_)
    if (std::ranges::count(error.ranks, rank) == 0) add_loss(error, rank, loss.why);
  std::ranges::sort(error.ranks);
  return error;
}

void Group::on_peer_closed(int rank, std::uint64_t next_number, Departure why) {
  {
    std::lock_guard lock(state_mutex_);
    std::uint64_t& departed = departed_[static_cast<std::size_t>(rank)];
    if (departed == ~0ULL) {
      departed = next_number;
      program_ended_[static_cast<std::size_t>(rank)] = why == kProgramEnded;
    }
    any_departed_.store(true, std::memory_order_release);
  }
  context_->bell().wake();
}

std::optional<Fingerprint> Group::recent_call(std::uint64_t channel) {
  std::lock_guard lock(recent_mutex_);
  const Recent& entry = recent_[channel % recent_.size()];
  return entry.channel == channel ? std::optional(entry.call) : std::nullopt;
}

// Some calls that differ wait for one another without a message between them: two ranks that both think
// themselves the root of a reduce.  So an operation that stalls shows its call to the next rank; going round,
// that finds any difference.
void Group::compare_with_neighbour(const Operation& op) {
  FrameHeader query = frame(FrameType::kCallQuery);
  query.channel = op.request().channel;
  query.code = kKnown;
  query.call = op.call();
  Link* next = link((rank() + 1) % size());
  if (size() > 1 && next != nullptr && !next->broken()) next->send_control(query);
}

void Group::on_call_query(int rank, const FrameHeader& query) {
  const std::uint64_t channel = query.channel;
  if (query.code == kKnown) on_call_seen(channel, query.call);
  FrameHeader reply = frame(FrameType::kCallReply);
  reply.channel = channel;
  auto call = recent_call(channel);
  if (call) {
    reply.code = kKnown;
    reply.call = *call;
  } else {
    std::lock_guard lock(recent_mutex_);
    reply.code = channel < next_number_ ? kPassed : kNotArrived;
  }
  if (Link* to = link(rank)) to->send_control(reply);
}

void Group::on_call_seen(std::uint64_t channel, const Fingerprint& call) {
  auto mine = recent_call(channel);
  if (mine && !(*mine == call)) suspect(channel);
}

void Group::suspect(std::uint64_t channel) { begin_inquiry(channel, true, {}, 0); }

void Group::begin_inquiry(std::uint64_t channel, bool mismatch, const std::string& operation,
                          std::int64_t timeout) {
  FrameHeader query = frame(FrameType::kCallQuery);
  query.channel = channel;
  {
    std::lock_guard lock(state_mutex_);
    if (broken() || inquiry_) return;
    inquiry_.emplace();
    inquiry_->channel = channel;
    inquiry_->mismatch = mismatch;
    inquiry_->operation = operation;
    inquiry_->timeout = timeout;
    inquiry_->until = now_ns() + kInquiryTime;
    inquiry_->replies.resize(static_cast<std::size_t>(size()));
    FrameHeader mine;
    if (auto call = recent_call(channel)) {
      mine.code = kKnown;
      mine.call = *call;
    }
    inquiry_->replies[static_cast<std::size_t>(rank())] = mine;
  }
  tell_all(query);
  context_->submitted(true);  // the progress thread watches the clock
}

void Group::on_call_reply(int rank, const FrameHeader& header) {
  {
    std::lock_guard lock(state_mutex_);
    if (!inquiry_ || inquiry_->channel != header.channel) return;
    inquiry_->replies[static_cast<std::size_t>(rank)] = header;
    for (auto& reply : inquiry_->replies)
      if (!reply) return;
    // A mismatch is told when all have arrived, so that the table is whole; the late ones get a little time.
    if (inquiry_->mismatch)
      for (auto& reply : inquiry_->replies)
        if (reply->code == kNotArrived) return;
  }
  finish_inquiry();
}

// Whether the calls themselves differ, not only what came before them.
bool Group::calls_differ(const Inquiry& inquiry) const {
  const auto& mine = inquiry.replies[static_cast<std::size_t>(rank())];
  for (auto& reply : inquiry.replies)
    if (!reply || reply->code != mine->code || !reply->call.same_call(mine->call)) return true;
  return false;
}

bool Group::histories_differ(const Inquiry& inquiry) const {
  const auto& mine = inquiry.replies[static_cast<std::size_t>(rank())];
  for (auto& reply : inquiry.replies)
    if (reply && mine && reply->call.history != mine->call.history) return true;
  return false;
}

// What is wrong with the group itself, if it is: how operations are dealt out to lanes.
std::string Group::different_lanes(const Inquiry& inquiry) const {
  std::string list;
  bool differ = false;
  const auto& mine = inquiry.replies[static_cast<std::size_t>(rank())];
  for (std::size_t r = 0; r < inquiry.replies.size(); ++r) {
    const auto& reply = inquiry.replies[r];
    if (!reply || reply->code != kKnown) continue;
    differ |= reply->call.lanes != mine->call.lanes;
    list += "\n  rank " + std::to_string(r) + ": concurrency=" + std::to_string(reply->call.lanes);
  }
  if (!differ) return {};
  return "the ranks of group '" + name() +
         "' have different numbers of lanes; give init() the same concurrency on all:" + list;
}

std::string Group::table(const Inquiry& inquiry) const {
  std::string text = "the ranks called different things as " +
                     (inquiry.channel & kKeyed ? std::string("one operation of a callback")
                                               : "operation " + std::to_string(inquiry.channel)) +
                     ":";
  for (std::size_t r = 0; r < inquiry.replies.size(); ++r) {
    const auto& reply = inquiry.replies[r];
    text += "\n  rank " + std::to_string(r) + ": ";
    if (!reply)
      text += "did not answer";
    else if (reply->code == kKnown)
      text += describe(reply->call);
    else
      text += reply->code == kPassed ? "has long finished it" : "has not called it yet";
  }
  return text;
}

void Group::finish_inquiry() {
  Error error;
  std::optional<std::uint64_t> earlier;
  {
    std::lock_guard lock(state_mutex_);
    if (!inquiry_) return;
    if (inquiry_->mismatch && inquiry_->channel > 0 && !calls_differ(*inquiry_) &&
        histories_differ(*inquiry_))
      earlier = inquiry_->channel - 1;
    if (earlier && recent_call(*earlier)) inquiry_.reset();
  }
  if (earlier && recent_call(*earlier)) {
    suspect(*earlier);  // all called the same here; their histories differ
    return;
  }
  {
    std::lock_guard lock(state_mutex_);
    if (!inquiry_) return;
    if (inquiry_->mismatch) {
      error.code = ErrorCode::kMismatch;
      error.text = different_lanes(*inquiry_);
      if (error.text.empty()) error.text = table(*inquiry_);
      if (!calls_differ(*inquiry_)) error.text += "\nThe sizes of their parts do not fit one another.";
    } else {
      error.code = ErrorCode::kTimeout;
      std::string absent, silent;
      bool differ = false;
      for (std::size_t r = 0; r < inquiry_->replies.size(); ++r) {
        const auto& reply = inquiry_->replies[r];
        if (reply && reply->code != kNotArrived) {
          differ |= reply->code == kKnown &&
                    !reply->call.same_call(inquiry_->replies[static_cast<std::size_t>(rank())]->call);
          continue;
        }
        error.ranks.push_back(static_cast<int>(r));
        std::string& list = reply ? absent : silent;
        list += (list.empty() ? "" : ", ") + std::to_string(r);
      }
      error.text =
          inquiry_->operation + " did not finish within its timeout of " + seconds(inquiry_->timeout);
      if (!absent.empty()) error.text += "; ranks that never arrived: " + absent;
      if (!silent.empty()) error.text += "; ranks that do not answer at all: " + silent;
      if (error.ranks.empty())
        error.text +=
            differ ? "; " + table(*inquiry_) : "; all ranks have arrived, but the data did not come in time";
    }
  }
  fail(std::move(error), true);
}

}  // namespace shoal
