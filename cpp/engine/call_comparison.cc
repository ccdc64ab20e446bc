#include "engine/call_comparison.h"

#include <algorithm>
#include <cstring>

#include "common/clock.h"
#include "engine/context.h"
#include "engine/describe.h"

namespace shoal {
namespace {

// Maximum times for peers to report their calls, and to make them.  A mismatch ends the program, and its
// table is worth a longer wait for a busy host.
constexpr std::int64_t kInquiryTime = 400 * kMillisecond;
constexpr std::int64_t kMismatchTime = 3 * kSecond;
constexpr std::int64_t kAskAgain = 100 * kMillisecond;

}  // namespace

void CallComparison::record_call(const Request& request, Fingerprint& call) {
  std::lock_guard lock(mutex_);
  if (request.numbered()) {
    call.history = history_;
    std::uint64_t words[sizeof(Fingerprint) / 8];
    std::memcpy(words, &call, sizeof words);
    for (std::uint64_t word : words) history_ = (history_ ^ word ^ (history_ >> 29)) * 0x9e3779b97f4a7c15ULL;
    next_number_ = request.channel + 1;
  }
  recent_[request.channel % kRecent] = {request.channel, call};
}

std::uint64_t CallComparison::next_number() {
  std::lock_guard lock(mutex_);
  return next_number_;
}

std::optional<std::uint64_t> CallComparison::history(std::uint64_t number) {
  std::lock_guard lock(mutex_);
  if (number == next_number_) return history_;
  auto* call = recent(number);
  return call == nullptr ? std::nullopt : std::optional(call->history);
}

const Fingerprint* CallComparison::recent(std::uint64_t channel) const {
  const Recent& entry = recent_[channel % kRecent];
  return entry.channel == channel ? &entry.call : nullptr;
}

void CallComparison::compare_with_neighbour(const Operation& op) {
  FrameHeader query = group_.frame(FrameType::kCallQuery);
  query.channel = op.request().channel;
  query.code = kKnown;
  query.call = op.call();
  Link* next = group_.link((group_.rank() + 1) % group_.size());
  if (group_.size() > 1 && next != nullptr && !next->broken()) next->send_control(query);
}

void CallComparison::on_query(int rank, const FrameHeader& query) {
  if (query.code == kKnown) on_peer_call(query.channel, query.call);
  FrameHeader reply = group_.frame(FrameType::kCallReply);
  reply.channel = query.channel;
  {
    std::lock_guard lock(mutex_);
    if (auto* call = recent(query.channel)) {
      reply.code = kKnown;
      reply.call = *call;
    } else {
      reply.code = query.channel < next_number_ ? kPassed : kNotArrived;
    }
  }
  if (Link* to = group_.link(rank)) to->send_control(reply);
}

void CallComparison::on_peer_call(std::uint64_t channel, const Fingerprint& call) {
  {
    std::lock_guard lock(mutex_);
    auto* mine = recent(channel);
    if (mine == nullptr || *mine == call) return;
  }
  start_mismatch(channel);
}

void CallComparison::start_timeout(const Request& request) {
  begin({.channel = request.channel, .operation = describe(request), .timeout = request.timeout});
}

void CallComparison::begin(Question question) {
  FrameHeader query = group_.frame(FrameType::kCallQuery);
  query.channel = question.channel;
  {
    std::lock_guard lock(mutex_);
    if (group_.broken() || question_) return;
    FrameHeader mine;
    if (auto* call = recent(question.channel)) {
      mine.code = kKnown;
      mine.call = *call;
    }
    question.ask_at = now_ns() + kAskAgain;
    question.until = now_ns() + (question.mismatch ? kMismatchTime : kInquiryTime);
    question.replies.resize(group_.size());
    question.replies[group_.rank()] = mine;
    question_ = std::move(question);
  }
  group_.send_to_all(query);
  group_.context().submitted(true);  // so that the progress thread checks the deadlines
}

void CallComparison::on_reply(int rank, const FrameHeader& reply) {
  {
    std::lock_guard lock(mutex_);
    if (!question_ || question_->channel != reply.channel) return;
    question_->replies[rank] = reply;
    if (!awaited().empty()) return;
  }
  finish();
}

void CallComparison::check(std::int64_t now, std::int64_t& next) {
  std::vector<int> asked;
  FrameHeader query = group_.frame(FrameType::kCallQuery);
  {
    std::lock_guard lock(mutex_);
    if (!question_) return;
    asked = awaited();
    if (question_->until <= now) asked.clear();
    if (!asked.empty()) {
      query.channel = question_->channel;
      next = std::min({next, question_->until, question_->ask_at});
      if (question_->ask_at > now) return;
      question_->ask_at = now + kAskAgain;
    }
  }
  if (asked.empty()) return finish();
  // A member that had not called the operation may have called it since; it replies only to queries.
  for (int rank : asked) group_.send_to(rank, query);
}

// A member that has left or is lost never answers.  A mismatch is reported when all members have arrived; for
// a late operation, some never arrive.
std::vector<int> CallComparison::awaited() const {
  std::vector<int> ranks;
  for (int r = 0; r < group_.size(); ++r) {
    const auto& reply = question_->replies[r];
    if (r == group_.rank() || (reply && !(question_->mismatch && reply->code == kNotArrived))) continue;
    if (group_.context().peers().state(group_.global(r)) == Peers::kAlive) ranks.push_back(r);
  }
  return ranks;
}

void CallComparison::stop() {
  std::lock_guard lock(mutex_);
  question_.reset();
}

void CallComparison::finish() {
  Question question;
  bool earlier = false;
  {
    std::lock_guard lock(mutex_);
    if (!question_) return;
    question = *question_;
    // All calls are the same here, but an earlier one differs.
    earlier = question.mismatch && question.channel > 0 && !calls_differ(question) &&
              histories_differ(question) && recent(question.channel - 1) != nullptr;
    if (earlier) question_.reset();
  }
  if (earlier) return start_mismatch(question.channel - 1);
  group_.fail(question.mismatch ? mismatch_error(question) : timeout_error(question), true);
}

// Whether the calls themselves differ, not only their histories.
bool CallComparison::calls_differ(const Question& question) const {
  const auto& mine = question.replies[group_.rank()];
  return std::ranges::any_of(question.replies, [&](const auto& reply) {
    return !reply || reply->code != mine->code || !reply->call.same_call(mine->call);
  });
}

bool CallComparison::histories_differ(const Question& question) const {
  const auto& mine = question.replies[group_.rank()];
  return std::ranges::any_of(question.replies, [&](const auto& reply) {
    return reply && reply->call.history != mine->call.history;
  });
}

// Returns an error text if the members made the group with different numbers of lanes or algorithms: then no
// calls match.
std::string CallComparison::different_groups(const Question& question) const {
  std::string list;
  bool differ = false;
  const auto& mine = question.replies[group_.rank()];
  for (std::size_t r = 0; r < question.replies.size(); ++r) {
    const auto& reply = question.replies[r];
    if (!reply || reply->code != kKnown) continue;
    differ |= reply->call.lanes != mine->call.lanes;
    list += "\n  rank " + std::to_string(r) +
            ": concurrency=" + std::to_string(reply->call.lanes & Fingerprint::kMaxLanes) +
            ", algorithm=" + name(static_cast<Algorithm>(reply->call.lanes >> Fingerprint::kAlgorithmShift));
  }
  if (!differ) return {};
  return "the ranks of group '" + group_.name() +
         "' have different numbers of lanes, or algorithms; give init() the same ones on all:" + list;
}

std::string CallComparison::table(const Question& question) const {
  std::string text = "the ranks called different things as " +
                     (question.channel & kKeyed ? std::string("one operation of a callback")
                                                : "operation " + std::to_string(question.channel)) +
                     ":";
  for (std::size_t r = 0; r < question.replies.size(); ++r) {
    const auto& reply = question.replies[r];
    text += "\n  rank " + std::to_string(r) + ": " +
            (!reply                   ? "did not answer"
             : reply->code == kKnown  ? describe(reply->call)
             : reply->code == kPassed ? "has already completed it"
                                      : "has not called it yet");
  }
  return text;
}

Error CallComparison::mismatch_error(const Question& question) const {
  std::string text = different_groups(question);
  if (text.empty()) text = table(question);
  if (!calls_differ(question)) text += "\nThe sizes of their parts do not fit one another.";
  return {ErrorCode::kMismatch, std::move(text)};
}

Error CallComparison::timeout_error(const Question& question) const {
  Error error{ErrorCode::kTimeout,
              "did not finish within its timeout of " + seconds(question.timeout),
              {},
              question.operation};
  const auto& mine = question.replies[group_.rank()];
  std::string absent, silent;
  bool differ = false;
  for (std::size_t r = 0; r < question.replies.size(); ++r) {
    const auto& reply = question.replies[r];
    if (reply && reply->code != kNotArrived) {
      differ |= reply->code == kKnown && !reply->call.same_call(mine->call);
      continue;
    }
    error.ranks.push_back(static_cast<int>(r));
    std::string& list = reply ? absent : silent;
    list += (list.empty() ? "" : ", ") + std::to_string(r);
  }
  if (!absent.empty()) error.text += "; ranks that never arrived: " + absent;
  if (!silent.empty())
    error.text += "; ranks that do not answer at all: " + silent +
                  " (a rank that hangs, or has not made this group under this name)";
  if (error.ranks.empty())
    error.text +=
        differ ? "; " + table(question) : "; all ranks have arrived, but the data did not come in time";
  return error;
}

}  // namespace shoal
