"""The records that ranks exchange in a commit: one row of 64-bit integers per rank."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import StateDiverged
from ..group import ProcessGroup

_HALVES = struct.Struct("<qq")


#: replaces the number of the step in the record of a block of ``attempts()``
BLOCK = -1


class Wish(enum.IntFlag):
    """Requests of a rank, handled after the step."""

    NONE = 0
    ADMIT = 1  #: processes wait to join
    LEAVE = 2  #: this rank leaves


class CommitRecord(NamedTuple):
    """The row of one rank.

    Attributes:
        epoch, step: epoch of the group, and number of the step to commit, or BLOCK.
        first, second: halves of a digest of the state that must be equal on all ranks.
        wishes: requests of this rank.
        busy: microseconds for which the step computed until its commit, without the waits of backward.
    """

    epoch: int
    step: int
    first: int
    second: int
    wishes: int = 0
    busy: int = 0

    @classmethod
    def of(cls, epoch: int, step: int, digest: bytes, wishes: Wish, busy: float) -> CommitRecord:
        """Return the row of a rank; ``digest`` has 16 bytes, ``busy`` is in seconds."""
        first, second = _HALVES.unpack(digest)
        return cls(epoch, step, first, second, int(wishes), max(int(busy * 1e6), 0))

    @property
    def digest(self) -> tuple[int, int]:
        """The digest, which must be equal on all ranks in the same epoch and step."""
        return self.first, self.second


_ROW = struct.Struct(f"={len(CommitRecord._fields)}q")


class CommitTable:
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


def leavers(rows: Sequence[CommitRecord]) -> tuple[int, ...]:
    """The ranks that leave."""
    return tuple(rank for rank, row in enumerate(rows) if row.wishes & Wish.LEAVE)


def all_wishes(rows: Sequence[CommitRecord]) -> Wish:
    """The union of the requests of all ranks."""
    wishes = Wish.NONE
    for row in rows:
        wishes |= Wish(row.wishes)
    return wishes
