// Members ask one another for their last calls when calls do not fit or an operation is late.
//
// Each member remembers its last calls.  A member that finds that a peer claims another call for the same
// operation, or that an operation's time has run out, asks all members what they called, and ends the group
// with a table of their answers.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/operation.h"

namespace shoal {

class Inquiry {
 public:
  explicit Inquiry(Group& group) : group_(group), recent_(kRecent) {}

  // Remembers a call, for peers that ask.  A numbered one gets the history of those before it.
  void note(const Request& request, Fingerprint& call);
  std::uint64_t next_number();  // of numbered operations: the first that was not submitted
  // A hash of all numbered calls before that one, if it is remembered.
  std::optional<std::uint64_t> history(std::uint64_t number);

  // A peer shows what it called.
  void seen(std::uint64_t channel, const Fingerprint& call);
  // A peer claims something else for the operation.
  void suspect(std::uint64_t channel) { begin({.channel = channel, .mismatch = true}); }
  // An operation's time has run out.
  void late(const Request& request);
  // Some calls that differ wait for one another without a message between them: two ranks that both think
  // themselves the root of a reduce.  So an operation that stalls shows its call to the next rank; going
  // round, that finds any difference.
  void compare_with_neighbour(const Operation& op);
  void on_query(int rank, const FrameHeader& query);
  void on_reply(int rank, const FrameHeader& reply);
  // Ends what has been asked for too long; the next time to look is written to `next` if earlier.
  void check(std::int64_t now, std::int64_t& next);
  // The group has ended: nothing is asked any more.
  void stop();

 private:
  static constexpr std::size_t kRecent = 256;
  struct Question {
    std::uint64_t channel = 0;
    bool mismatch = false;
    std::string operation = {};
    std::int64_t timeout = 0;
    std::int64_t until = 0;   // it waits no longer for answers
    std::int64_t ask_at = 0;  // it asks again
    std::vector<std::optional<FrameHeader>> replies = {};
  };
  struct Recent {
    std::uint64_t channel = ~0ULL;
    Fingerprint call;
  };
  void begin(Question question);
  // Under the mutex: the members whose answers may still complete the table.
  std::vector<int> awaited() const;
  void finish();
  // Under the mutex: the call that this member made, if it remembers it.
  const Fingerprint* recent(std::uint64_t channel) const;
  bool calls_differ(const Question& question) const;
  bool histories_differ(const Question& question) const;
  std::string table(const Question& question) const;
  std::string different_lanes(const Question& question) const;
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
