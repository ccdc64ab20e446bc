"""What a session remembers of a group that became smaller."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resize:
    """The survivors have gone on in a new group.

    Attributes:
        step: number of the next step, which is the first to run in the new group.
        again: whether that step had begun in the old group.
        epoch: of the new group.
        rank: of this process in the new group.
        size: of the new group.
        previous_size: of the old group.
        lost: ranks of the old group that are not in the new one, ascending.
        seconds: from the error to the new group, on this rank.
    """

    step: int
    again: bool
    epoch: int
    rank: int
    size: int
    previous_size: int
    lost: tuple[int, ...]
    seconds: float
