"""What each rank tells all others in the exchange of a commit: one row of 64-bit integers."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import StateDiverged
from ..group import ProcessGroup

_HALVES = struct.Struct("<qq")


#: stands for the number of a step in the record of a block between two steps
BLOCK = -1


class Wish(enum.IntFlag):
    """What a rank asks of all others, for the time after the step."""

    NONE = 0
    ADMIT = 1  #: processes wait that want to join
    LEAVE = 2  #: this rank leaves


class CommitRecord(NamedTuple):
    """One row.

    Attributes:
        epoch, step: of the group, and the number of the step that is committed, or BLOCK.
        first, second: halves of a digest of what must be equal on all ranks.
        wishes: of this rank.
        busy: microseconds from the beginning of the step's block to its commit, without those in which
            backward waited for other ranks.
    """

    epoch: int
    step: int
    first: int
    second: int
    wishes: int = 0
    busy: int = 0

    @classmethod
    def of(cls, epoch: int, step: int, digest: bytes, wishes: Wish, busy: float) -> CommitRecord:
        """The row of a rank; ``digest`` has 16 bytes, ``busy`` is in seconds."""
        first, second = _HALVES.unpack(digest)
        return cls(epoch, step, first, second, int(wishes), max(int(busy * 1e6), 0))

    @property
    def digest(self) -> tuple[int, int]:
        """What must be equal on all ranks, in the same epoch and step."""
        return self.first, self.second


_ROW = struct.Struct(f"={len(CommitRecord._fields)}q")


class CommitTable:
    """The records of all ranks of one group, and their exchange.

    Its tensors are made once: to make them in each commit took a third of its time.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._mine, self._rows = bytearray(_ROW.size), bytearray(_ROW.size * group.size)
        self._sent = torch.frombuffer(self._mine, dtype=torch.int64)
        self._received = torch.frombuffer(self._rows, dtype=torch.int64)

    def exchange(self, mine: CommitRecord) -> list[CommitRecord]:
        """The records of all ranks; raises GroupError."""
        _ROW.pack_into(self._mine, 0, *mine)
        self._group.all_gather_single(self._received, self._sent).wait()
        return [CommitRecord._make(row) for row in _ROW.iter_unpack(self._rows)]


def agree(rows: Sequence[CommitRecord]) -> bool:
    """Whether all ranks commit the same."""
    return len({row[:4] for row in rows}) == 1


def divergence(
    rows: Sequence[CommitRecord], group: ProcessGroup, what: str, *, everything: bool
) -> StateDiverged:
    """The error of ranks that do not agree.

    Args:
        what: they have tried.
        everything: whether parameters and optimisers were compared too.
    """
    first, said = rows[0], []
    for rank, row in enumerate(rows):
        if (row.epoch, row.step) != (first.epoch, first.step):
            does = "ends a block of attempts()" if row.step == BLOCK else f"commits step {row.step}"
            said.append(f"rank {rank} {does} in epoch {row.epoch}")
        elif row.digest != first.digest and row.step == BLOCK:
            said.append(f"rank {rank} has run another number of such blocks than rank 0")
        elif row.digest != first.digest:
            differs = "parameters, optimisers or samples" if everything else "samples"
            said.append(f"rank {rank} has other {differs} than rank 0")
    return StateDiverged(
        f"{what} on rank {group.rank} of {group.size}: {'; '.join(said)}.  Every rank must make the same "
        "State, load the same checkpoint before the session, and run the same blocks"
    )


def leavers(rows: Sequence[CommitRecord]) -> tuple[int, ...]:
    """The ranks that leave."""
    return tuple(rank for rank, row in enumerate(rows) if row.wishes & Wish.LEAVE)


def all_wishes(rows: Sequence[CommitRecord]) -> Wish:
    """What any rank asks for."""
    wishes = Wish.NONE
    for row in rows:
        wishes |= Wish(row.wishes)
    return wishes
