"""The progress of each surviving rank, and the step with which they continue.

A rank has *prepared* a step when it has called ``commit``: it holds all averaged gradients.  It has
*committed* the step when the exchange in ``commit`` is complete, which proves that every rank had prepared
it.  Each surviving rank sends both as its note in the rebuild, so all ranks decide alike.

In this module a step may also be a block of ``session.attempts()``: blocks are numbered with the steps, and
prepared and committed at their end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

_NOTE = struct.Struct("<qqq?")
_NONE = -1


class RankProgress(NamedTuple):
    """The progress of one rank.

    Attributes:
        committed: number of steps and blocks that it knows to be completed, which is also the number of the
            next one.  -1: it has joined, and does not hold the state yet.
        prepared: the number of the step that it has prepared and not committed, or -1.
        epoch: the epoch of the group in which it prepared that step.  After a second loss during a rebuild, a
            rank may vote with a note of the previous epoch.
        ends: whether the session ends because too few ranks would remain.
    """

    committed: int
    prepared: int = _NONE
    epoch: int = 0
    ends: bool = False

    def encode(self) -> bytes:
        """Return the note for a rebuild."""
        return _NOTE.pack(*self)

    @classmethod
    def decode(cls, note: bytes) -> RankProgress:
        """Return the progress in ``note``."""
        return cls(*_NOTE.unpack(note))


#: the progress of a rank that has joined and does not hold the state yet
NOTHING = RankProgress(_NONE)


def steps_that_count(survivors: Iterable[RankProgress]) -> int:
    """Return the number of completed steps, or -1 if no rank holds the state.

    A step is completed if any rank has committed it or all have prepared it, as all averaged gradients exist
    then.  A step that only some have prepared is repeated: if any rank had committed it, all would have
    prepared it.  Ranks that do not hold the state are ignored.
    """
    known = [each for each in survivors if each.committed >= 0]
    if not known:
        return _NONE
    committed = max(each.committed for each in known)
    epoch = known[0].epoch
    if all(each[:3] == (committed, committed, epoch) for each in known):
        return committed + 1
    return committed
