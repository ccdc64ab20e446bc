// An additional acceptor, for groups of which exactly half survives: a key of the job's store.
//
// This is the state stored under the key, and its transition on a request.  The caller stores it with a
// compare-and-set.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "consensus/decision.h"

namespace shoal::consensus {

struct WitnessRequest {
  std::uint64_t ballot = 0;
  std::optional<Decision> decision;  // to accept; none: a promise is requested
  bool operator==(const WitnessRequest&) const = default;
};

struct WitnessAnswer {
  std::uint64_t ballot = 0;  // of the request
  bool accepts = false;      // the request had a decision
  bool granted = false;
  std::uint64_t promised = 0;
  std::optional<Accepted> accepted;  // before the request
};

class Witness {
 public:
  WitnessAnswer ask(const WitnessRequest& request) {
    WitnessAnswer answer{request.ballot, request.decision.has_value(), request.ballot >= promised_, promised_,
                         accepted_};
    if (!answer.granted) return answer;
    promised_ = request.ballot;
    if (request.decision) accepted_ = Accepted{request.ballot, *request.decision};
    return answer;
  }

  // Encodes and decodes the state for a group of `size`; empty: no state yet.  `read` returns a description
  // of the flaw of the bytes; null if valid.
  std::string bytes(int size) const;
  const char* read(std::string_view bytes, int size);

  const std::optional<Accepted>& accepted() const { return accepted_; }

 private:
  std::uint64_t promised_ = 0;
  std::optional<Accepted> accepted_;
};

}  // namespace shoal::consensus
