// Why a group or an operation failed.
//
// The core collects facts; the text of the exception is composed in Python
// (src/shoal/backend/native/errors.py).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/frame.h"

namespace shoal {

// The loss of one member of the group.
struct LostRank {
  int rank = -1;
  std::string cause;
  int reporter = -1;  // the rank that observed the loss; -1: this one
};

struct Error {
  ErrorCode code = ErrorCode::kNone;
  std::string text = {};        // the cause; empty where losses are the cause
  std::vector<int> ranks = {};  // of the group, those that caused the failure
  std::string subject = {};     // the operation of which `text` is the predicate; may be empty
  std::vector<LostRank> lost = {};
  int reporter = -1;            // the rank that reported `text`; -1: this one
  std::string operation = {};   // the operation of this rank that failed; empty in the failure of a group
  std::string absence = {};     // if this rank is among the lost: why it did not answer the others
  std::int64_t completed = -1;  // Lanes::last_completed() when the operation failed

  void add(LostRank loss);
  bool blames(int rank) const;
};

// The payload of a kBroken frame, of at most kTextLimit bytes.  Code, operation and absence are not in it.
//
//   u32 count, {i32 rank}...                                  the ranks
//   u32 count, {i32 rank, i32 reporter, u32 bytes, cause}...  the losses
//   i32 reporter, u32 bytes, subject, text                    up to the end
std::string encode(const Error& error);
// Reads the payload of a kBroken frame of a member of a group of `size` ranks.  Returns its flaw, or null.
const char* decode(const std::string& payload, int size, Error& error);

}  // namespace shoal
