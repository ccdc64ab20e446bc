// Encoding: the promised and the accepted ballot (8 bytes each), and the accepted proposal as a kPropose.

#include "consensus/witness.h"

#include "common/bytes.h"
#include "consensus/message.h"

namespace shoal::consensus {
namespace {

struct Head {
  std::uint64_t promised = 0;
  std::uint64_t accepted = 0;
};

}  // namespace

std::string Witness::bytes(int size) const {
  const Head head{promised_, accepted_ ? accepted_->ballot : 0};
  std::string result;
  put(result, head);
  if (!accepted_) return result;
  Message proposal{MessageType::kPropose, head.accepted, RankSet(size), RankSet(size), {}, 0, {}};
  proposal.decision = accepted_->decision;
  return result + encode(proposal, size);
}

const char* Witness::read(std::string_view bytes, int size) {
  promised_ = 0;
  accepted_.reset();
  if (bytes.empty()) return nullptr;
  ByteReader reader(bytes);
  const auto head = reader.get<Head>();
  if (!reader.well()) return "the stored state of a witness ends early";
  if (head.promised >= kBallotLimit || head.accepted > head.promised)
    return "the stored state of a witness has wrong ballots";
  promised_ = head.promised;
  if (reader.ended()) return nullptr;
  const auto leader = static_cast<int>(head.accepted % static_cast<std::uint64_t>(size));
  Message proposal;
  if (const char* flaw = decode(reader.rest(), {size, leader, leader}, proposal)) return flaw;
  if (proposal.type != MessageType::kPropose || proposal.ballot != head.accepted)
    return "the stored state of a witness does not contain a proposal of its ballot";
  accepted_ = Accepted{head.accepted, *proposal.decision};
  return nullptr;
}

}  // namespace shoal::consensus
