// The members that must answer before a ballot proceeds.
//
// Two surviving members never decide differently if any two quorums share a member, or all members of one of
// them have died.  This holds for a majority of all members, and for all members except the certainly dead.
// It does not hold for a majority of the members *not known to be dead*: each side of a partition can have
// one.
#pragma once

namespace shoal::consensus {

// The answers to one phase of a ballot.
struct Standing {
  int size = 0;      // of the group
  int answered = 0;  // members that answered
  int living = 0;    // of these, members that the leader does not know to be dead
  // Of all others, members that the leader and all living members know to be dead, and whose frames they
  // drop.  Counted when the leader has lost all members that have not answered.
  int dead = 0;
  int lost = 0;  // of the members that have not answered, those that the leader has lost, dead or not
};

enum class Quorum { kNo, kYes, kWithWitness };

using QuorumRule = Quorum (*)(const Standing&);

inline Quorum safe_quorum(const Standing& standing) {
  if (standing.living + standing.dead == standing.size || 2 * standing.answered > standing.size)
    return Quorum::kYes;
  const bool tied = 2 * standing.answered == standing.size;
  return tied && standing.answered + standing.lost == standing.size ? Quorum::kWithWitness : Quorum::kNo;
}

}  // namespace shoal::consensus
