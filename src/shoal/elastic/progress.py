"""How far each survivor had come, and which step the survivors go on with.

A rank has *prepared* a step when it has called ``commit``: all averaged gradients are there.  It has
*committed* the step when the exchange in ``commit`` has come to its end: this proves that every rank had
prepared it.  Each survivor gives both as its note in the rebuild, so all of them decide alike.

The blocks of ``session.attempts()`` between two steps are numbered with the steps, and prepared and committed
at their end: what is called a step here is either.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

_NOTE = struct.Struct("<qqq?")
_NONE = -1


class RankProgress(NamedTuple):
    """How far one rank has come.

    Attributes:
        committed: how many steps and blocks count, as far as it knows; the next one has this number.  -1: it
            has joined, and does not hold the state yet.
        prepared: the number of the step that it has prepared and not committed, or -1.
        epoch: of the group in which it has prepared that step.  A rank may vote with a note of the epoch
            before, when a second death repeats its rebuild.
        ends: whether the session ends here, because too few ranks would be left.
    """

    committed: int
    prepared: int = _NONE
    epoch: int = 0
    ends: bool = False

    def encode(self) -> bytes:
        """The note for a rebuild."""
        return _NOTE.pack(*self)

    @classmethod
    def decode(cls, note: bytes) -> RankProgress:
        """The progress of which ``note`` tells."""
        return cls(*_NOTE.unpack(note))


#: of a rank that has joined and does not hold the state yet
NOTHING = RankProgress(_NONE)


def steps_that_count(survivors: Iterable[RankProgress]) -> int:
    """How many steps count (-1: nobody knows): what some survivor has committed, and what all have prepared.

    A step that all survivors have prepared counts although a rank that died may not have committed it: no
    averaged gradient is lost.  One that only some have prepared is computed again: had any rank committed it,
    all would have prepared it.  Ranks that do not hold the state do not count.
    """
    known = [each for each in survivors if each.committed >= 0]
    if not known:
        return _NONE
    committed = max(each.committed for each in known)
    epoch = known[0].epoch
    if all(each[:3] == (committed, committed, epoch) for each in known):
        return committed + 1
    return committed
