#include "engine/error.h"

#include <algorithm>
#include <utility>

#include "common/bytes.h"
#include "net/check.h"

namespace shoal {
namespace {

constexpr std::size_t kRoomForText = kTextLimit / 2;  // minimum room for the text beside ranks and losses

}  // namespace

void Error::add(LostRank loss) {
  ranks.push_back(loss.rank);
  lost.push_back(std::move(loss));
}

bool Error::blames(int rank) const { return std::ranges::find(ranks, rank) != ranks.end(); }

std::string encode(const Error& error) {
  const std::size_t room = kTextLimit - kRoomForText;
  std::string bytes;
  const std::size_t ranks = std::min(error.ranks.size(), room / 2 / sizeof(std::int32_t));
  put(bytes, static_cast<std::uint32_t>(ranks));
  for (std::size_t i = 0; i < ranks; ++i) put(bytes, static_cast<std::int32_t>(error.ranks[i]));
  std::string losses;
  std::uint32_t count = 0;
  for (const LostRank& loss : error.lost) {
    std::string one;
    put(one, static_cast<std::int32_t>(loss.rank));
    put(one, static_cast<std::int32_t>(loss.reporter));
    put(one, static_cast<std::uint32_t>(loss.cause.size()));
    one += loss.cause;
    if (bytes.size() + losses.size() + one.size() > room) break;
    losses += one;
    ++count;
  }
  put(bytes, count);
  bytes += losses;
  put(bytes, static_cast<std::int32_t>(error.reporter));
  put(bytes, static_cast<std::uint32_t>(error.subject.size()));
  bytes += error.subject;
  bytes.append(error.text, 0, clipped(error.text.data(), error.text.size(), kTextLimit - bytes.size()));
  return bytes;
}

const char* decode(const std::string& payload, int size, Error& error) {
  ByteReader reader(payload);
  bool members = true;
  auto rank = [&](int least) {
    const int number = reader.get<std::int32_t>();
    members &= number >= least && number < size;
    return number;
  };
  for (auto left = reader.get<std::uint32_t>(); reader.well() && left > 0; --left)
    error.ranks.push_back(rank(0));
  for (auto left = reader.get<std::uint32_t>(); reader.well() && left > 0; --left) {
    LostRank loss;
    loss.rank = rank(0);
    loss.reporter = rank(-1);
    loss.cause = reader.text(reader.get<std::uint32_t>());
    error.lost.push_back(std::move(loss));
  }
  error.reporter = rank(-1);
  error.subject = reader.text(reader.get<std::uint32_t>());
  error.text = reader.rest();
  if (!reader.well()) return "an error that is not one";
  return members ? nullptr : "an error of ranks that are not in the group";
}

namespace {

std::string reported_by(int rank) {
  return rank < 0 ? std::string() : " (reported by rank " + std::to_string(rank) + ")";
}

std::string cause(const Error& error, const std::string& subject) {
  std::vector<std::string> causes;
  if (!error.text.empty()) {
    // These texts name their ranks: the table of a mismatch all of them, an abort its caller.
    const bool names_ranks = error.code == ErrorCode::kMismatch || error.code == ErrorCode::kAborted;
    causes.push_back((subject.empty() ? error.text : subject + " " + error.text) +
                     reported_by(names_ranks ? -1 : error.reporter));
  }
  for (std::size_t i = 0; i < error.lost.size();) {
    const int reporter = error.lost[i].reporter;
    std::string losses;
    for (; i < error.lost.size() && error.lost[i].reporter == reporter; ++i)
      losses += (losses.empty() ? "rank " : "; rank ") + std::to_string(error.lost[i].rank) +
                " is lost: " + error.lost[i].cause;
    causes.push_back(losses + reported_by(reporter));
  }
  std::string all;
  for (const std::string& each : causes) all += (all.empty() ? "" : "; ") + each;
  return error.absence.empty() ? all : error.absence + "; the others gave it up: " + all;
}

}  // namespace

std::string explain(const Error& error, int rank, const std::string& group) {
  if (error.operation.empty()) return cause(error, error.subject);
  const std::string completed = error.completed < 0
                                    ? "no operation had completed here"
                                    : "last operation completed here: " + std::to_string(error.completed);
  const std::string where =
      error.operation + " on rank " + std::to_string(rank) + " of group '" + group + "' (" + completed + ")";
  if (error.subject == error.operation) return cause(error, where);
  return where + " failed: " + cause(error, error.subject);
}

bool caused_by_others(const Error& error, int rank) {
  const bool possible = error.code == ErrorCode::kPeerLost || error.code == ErrorCode::kAborted ||
                        error.code == ErrorCode::kClosed;
  return possible && !error.blames(rank);
}

}  // namespace shoal
