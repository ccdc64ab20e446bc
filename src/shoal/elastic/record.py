"""What each rank tells all others in the exchange of a commit: one row of 64-bit integers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple


class Wish(enum.IntFlag):
    """What a rank asks of all others, for the time after the step."""

    NONE = 0
    ADMIT = 1  #: processes wait that want to join
    LEAVE = 2  #: this rank leaves


class Record(NamedTuple):
    """One row.

    Attributes:
        epoch, step: of the group, and the number of the step that is committed.
        first, second: halves of a digest of what must be equal on all ranks.
        wishes: of this rank.
        busy: microseconds from the beginning of the step's block to its commit, without those in which
            backward waited for other ranks.
    """

    epoch: int
    step: int
    first: int
    second: int
    wishes: int = Wish.NONE
    busy: int = 0

    @classmethod
    def of(cls, epoch: int, step: int, digest: bytes, wishes: Wish, busy: float) -> Record:
        """The row of a rank; ``digest`` has 16 bytes, ``busy`` is in seconds."""
        first, second = (int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:]))
        return cls(epoch, step, first, second, wishes, max(int(busy * 1e6), 0))

    @property
    def digest(self) -> tuple[int, int]:
        """What must be equal on all ranks, in the same epoch and step."""
        return self.first, self.second


def agree(rows: Sequence[Record]) -> bool:
    """Whether all ranks commit the same."""
    return len({row[:4] for row in rows}) == 1


def leavers(rows: Sequence[Record]) -> tuple[int, ...]:
    """The ranks that leave."""
    return tuple(rank for rank, row in enumerate(rows) if row.wishes & Wish.LEAVE)


def all_wishes(rows: Sequence[Record]) -> Wish:
    """What any rank asks for."""
    wishes = Wish.NONE
    for row in rows:
        wishes |= Wish(row.wishes)
    return wishes
