"""The agreement of all ranks on completed steps: records in a commit, and notes in a rebuild after a loss.

A rank has *prepared* a step when it has called ``commit``: it holds all averaged gradients. It has
*committed* the step when the exchange in ``commit`` is complete, which proves that every rank had prepared
it. Each surviving rank sends both as its note in the rebuild, so all ranks decide alike.

In this module a step may also be a block of ``session.attempts()``: blocks are numbered with the steps, and
prepared and committed at their end.

The program continues after the block of an interrupted step, and not after a completed one, so all ranks must
have the same interruptions. A rank may detect a loss in a step while another detects it before the step, in a
collective that has completed for the first rank. So the latter's next step is interrupted too.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..errors import StateDiverged
from ..group import ProcessGroup

_HALVES = struct.Struct("<qq")


#: replaces the number of the step in the record of a block of ``attempts()``
BLOCK = -1


class Requests(enum.IntFlag):
    """Requests of a rank, handled after the step."""

    NONE = 0
    ADMIT = 1  #: processes wait to join
    LEAVE = 2  #: this rank leaves


class CommitRecord(NamedTuple):
    """The row of one rank.

    Attributes:
        epoch, step: epoch of the group, and number of the step to commit, or BLOCK.
        first, second: halves of a digest of the state that must be equal on all ranks.
        requests: requests of this rank.
        busy: microseconds for which the step computed until its commit, without the waits of backward.
    """

    epoch: int
    step: int
    first: int
    second: int
    requests: int = 0
    busy: int = 0

    @classmethod
    def of(cls, epoch: int, step: int, digest: bytes, requests: Requests, busy: float) -> CommitRecord:
        """Return the row of a rank; ``digest`` has 16 bytes, ``busy`` is in seconds."""
        first, second = _HALVES.unpack(digest)
        return cls(epoch, step, first, second, int(requests), max(int(busy * 1e6), 0))

    @property
    def digest(self) -> tuple[int, int]:
        """The digest, which must be equal on all ranks in the same epoch and step."""
        return self.first, self.second


_ROW = struct.Struct(f"={len(CommitRecord._fields)}q")


class CommitExchange:
    """The exchange of the records of one group.

    Its tensors are allocated once: allocating them in each commit took a third of the commit's time.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._mine, self._rows = bytearray(_ROW.size), bytearray(_ROW.size * group.size)
        self._sent = torch.frombuffer(self._mine, dtype=torch.int64)
        self._received = torch.frombuffer(self._rows, dtype=torch.int64)

    def exchange(self, mine: CommitRecord) -> list[CommitRecord]:
        """Exchange the records and return those of all ranks; raises GroupError."""
        _ROW.pack_into(self._mine, 0, *mine)
        self._group.all_gather_single(self._received, self._sent).wait()
        return [CommitRecord._make(row) for row in _ROW.iter_unpack(self._rows)]


def agree(rows: Sequence[CommitRecord]) -> bool:
    """Whether all ranks commit the same step with the same digest."""
    return len({row[:4] for row in rows}) == 1


def divergence(
    rows: Sequence[CommitRecord], group: ProcessGroup, what: str, *, everything: bool
) -> StateDiverged:
    """Return the error of the exchange ``what``; ``everything``: parameters and optimisers were compared."""
    first, said = rows[0], []
    for rank, row in enumerate(rows):
        if (row.epoch, row.step) != (first.epoch, first.step):
            does = "ends a block of attempts()" if row.step == BLOCK else f"commits step {row.step}"
            said.append(f"rank {rank} {does} in epoch {row.epoch}")
        elif row.digest != first.digest and row.step == BLOCK:
            said.append(f"rank {rank} has run a different number of such blocks than rank 0")
        elif row.digest != first.digest:
            differs = "parameters, optimisers or samples" if everything else "samples"
            said.append(f"rank {rank} has different {differs} than rank 0")
    return StateDiverged(
        f"{what} on rank {group.rank} of {group.size}: {'; '.join(said)}.  Every rank must make the same "
        "State, load the same checkpoint before the session, and run the same blocks"
    )


_NOTE = struct.Struct("<qqq??")
_NONE = -1


class RankProgress(NamedTuple):
    """The progress of one rank.

    Attributes:
        committed: number of steps and blocks that it knows to be completed, which is also the number of the
            next one.  -1: it has joined, and does not hold the state yet.
        prepared: the number of the step that it has prepared and not committed, or -1.
        epoch: the epoch of the group in which it prepared that step, or was in the next one.  After a second
            loss during a rebuild, a rank may vote with a note of the previous epoch.
        in_step: whether it was in the block of the next step, which may be a prepared one, and not in a block
            of ``attempts()``.
        ends: whether the session ends because too few ranks would remain.
    """

    committed: int
    prepared: int = _NONE
    epoch: int = 0
    in_step: bool = False
    ends: bool = False

    def encode(self) -> bytes:
        """Return the note for a rebuild."""
        return _NOTE.pack(*self)

    @classmethod
    def decode(cls, note: bytes) -> RankProgress:
        """Return the progress in ``note``."""
        return cls(*_NOTE.unpack(note))


#: the progress of a rank that has joined and does not hold the state yet
NO_STATE = RankProgress(_NONE)


def num_completed_steps(survivors: Iterable[RankProgress]) -> int:
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


def was_interrupted(survivors: Iterable[RankProgress], number: int, epoch: int) -> bool:
    """Whether any rank was in the step ``number``, not completed, in the group of ``epoch``."""
    return any(each.in_step and (each.committed, each.epoch) == (number, epoch) for each in survivors)
