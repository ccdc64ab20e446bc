// Which members must have answered before a ballot goes on.
//
// Two members that live never decide differently if any two quorums share a member, or one of them has died
// as a whole.  A majority of all members gives that, and so do all members but those that are certainly dead;
// a majority of those *not known dead* does not: each side of a cut can have one.
#pragma once

namespace shoal::agreement {

// The answers to one phase of a ballot.
struct Standing {
  int size = 0;      // of the group
  int answered = 0;  // members that did
  int living = 0;    // of these, those that the leader does not know to be dead
  // Of all but the living: those that the leader and all the living know to be dead, and drop all frames of.
  // Counted once the leader has lost all that have not answered.
  int dead = 0;
  int lost = 0;  // of those that have not answered: those that the leader has lost, dead or not
};

enum class Quorum { kNo, kYes, kWithWitness };

using QuorumRule = Quorum (*)(const Standing&);

inline Quorum safe_quorum(const Standing& standing) {
  if (standing.living + standing.dead == standing.size || 2 * standing.answered > standing.size)
    return Quorum::kYes;
  const bool tied = 2 * standing.answered == standing.size;
  return tied && standing.answered + standing.lost == standing.size ? Quorum::kWithWitness : Quorum::kNo;
}

}  // namespace shoal::agreement
