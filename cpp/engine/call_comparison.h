// Comparison of the members' calls, when calls do not match or an operation is late.
//
// Each member remembers its last calls.  A member that sees a different call for the same operation, or whose
// operation timed out, asks all members for their calls, and fails the group with a table of the answers.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/operation.h"

namespace shoal {

class CallComparison {
 public:
  explicit CallComparison(Group& group) : group_(group), recent_(kRecent) {}

  // Remembers a call, for queries of peers, and sets the history of a numbered one.
  void record_call(const Request& request, Fingerprint& call);
  std::uint64_t next_number();  // the first numbered operation that was not submitted
  // A hash of all numbered calls before `number`, if remembered.
  std::optional<std::uint64_t> history(std::uint64_t number);

  // A peer has sent its call.
  void on_peer_call(std::uint64_t channel, const Fingerprint& call);
  // A peer has made a different call as this operation.
  void start_mismatch(std::uint64_t channel) { begin({.channel = channel, .mismatch = true}); }
  // An operation has timed out.
  void start_timeout(const Request& request);
  // Some mismatched calls wait for each other without a message, such as two roots of a reduce.  So a stalled
  // operation sends its call to the next rank; around the ring, this finds any difference.
  void compare_with_neighbour(const Operation& op);
  void on_query(int rank, const FrameHeader& query);
  void on_reply(int rank, const FrameHeader& reply);
  // Finishes inquiries that took too long; lowers `next` to the time of the next check.
  void check(std::int64_t now, std::int64_t& next);
  // The group has ended: cancels the inquiry.
  void stop();

 private:
  static constexpr std::size_t kRecent = 256;
  struct Question {
    std::uint64_t channel = 0;
    bool mismatch = false;
    std::string operation = {};
    std::int64_t timeout = 0;
    std::int64_t until = 0;   // end of the wait for answers
    std::int64_t ask_at = 0;  // time of the next query
    std::vector<std::optional<FrameHeader>> replies = {};
  };
  struct Recent {
    std::uint64_t channel = ~0ULL;
    Fingerprint call;
  };
  void begin(Question question);
  // The members whose answers may still complete the table.  Requires the mutex.
  std::vector<int> awaited() const;
  void finish();
  // This member's call, if remembered.  Requires the mutex.
  const Fingerprint* recent(std::uint64_t channel) const;
  bool calls_differ(const Question& question) const;
  bool histories_differ(const Question& question) const;
  std::string table(const Question& question) const;
  std::string different_groups(const Question& question) const;
  Error mismatch_error(const Question& question) const;
  Error timeout_error(const Question& question) const;

  Group& group_;
  std::mutex mutex_;
  std::vector<Recent> recent_;
  std::uint64_t next_number_ = 0;
  std::uint64_t history_ = 0;
  std::optional<Question> question_;
};

}  // namespace shoal
