// The error of a group or an operation.
//
// It consists of facts, which the ranks exchange; explain() composes the exception's text from them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "net/frame.h"

namespace shoal {

// The loss of one member of the group.
struct LostRank {
  int rank = -1;
  std::string cause;
  int reporter = -1;  // the rank that observed the loss; -1: this one
};

struct Error {
  ErrorCode code = ErrorCode::kNone;
  std::string text = {};        // the cause; empty if losses are the cause
  std::vector<int> ranks = {};  // group ranks that caused the failure
  std::string subject = {};     // the operation that `text` describes; may be empty
  std::vector<LostRank> lost = {};
  int reporter = -1;            // the rank that reported `text`; -1: this one
  std::string operation = {};   // this rank's failed operation; empty for a group's failure
  std::string absence = {};     // why this rank did not answer its peers, if it was evicted
  std::int64_t completed = -1;  // Lanes::last_completed() when the operation failed

  void add(LostRank loss);
  bool blames(int rank) const;
};

// The text of the exception on `rank` of `group`.
std::string explain(const Error& error, int rank, const std::string& group);
// Whether other ranks than `rank` caused the error.
bool caused_by_others(const Error& error, int rank);

// The payload of a kBroken frame, of at most kTextLimit bytes.  It lacks code, operation and absence.
//
//   u32 count, {i32 rank}...                                  the ranks
//   u32 count, {i32 rank, i32 reporter, u32 bytes, cause}...  the losses
//   i32 reporter, u32 bytes, subject, text                    up to the end
std::string encode(const Error& error);
// Reads the payload of a kBroken frame of a member of a group of `size` ranks.  Returns its flaw, or null.
const char* decode(const std::string& payload, int size, Error& error);

}  // namespace shoal
