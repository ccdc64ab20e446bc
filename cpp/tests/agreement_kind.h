// The kinds of simulated agreements, and what happens in them.
#pragma once

namespace shoal::stress {

// Properties that some rounds have.
struct Kind {
  bool calm = false;   // all losses are deaths and certain, and soon known; who votes late does so very late
  bool clean = false;  // nobody dies, all votes come in time, one cut divides the group in two
  bool pairs = false;  // nobody dies, and all vote in time and after they have heard of all cuts
  bool witness = false;  // it answers
  bool quiet() const { return calm || clean || pairs; }
};

enum class What { kVote, kMessage, kCrash, kLeave, kLoss, kDeath, kCut, kTick, kAsk, kAnswer };

}  // namespace shoal::stress
