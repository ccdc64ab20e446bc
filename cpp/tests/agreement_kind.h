// The kinds of simulated agreements, and their events.
#pragma once

namespace shoal::stress {

// Properties of some rounds.
struct Kind {
  bool calm = false;     // all losses are certain deaths and soon known; late votes are very late
  bool clean = false;    // no member dies, all votes are in time, one cut divides the group in two
  bool pairs = false;    // no member dies, and all vote in time, after they have detected all cuts
  bool witness = false;  // the witness answers
  bool quiet() const { return calm || clean || pairs; }
};

enum class What { kVote, kMessage, kCrash, kLeave, kLoss, kDeath, kCut, kTick, kAsk, kAnswer };

}  // namespace shoal::stress
