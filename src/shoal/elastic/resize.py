"""What a session remembers of a group that became smaller or larger."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resize:
    """The session has gone on in a new group.

    Attributes:
        step: number of the next step, which is the first to run in the new group.
        again: whether that step had begun in the old group.
        epoch: of the new group.
        rank: of this process in the new group.
        size: of the new group.
        previous_size: of the old group.
        lost: ranks of the old group that were lost, ascending.
        left: ranks of the old group that have left it, ascending.
        joined: ranks of the new group that were not in the old one, ascending.
        seconds: for which this rank did not train: from the error, or from the end of the step before, to the
            new group, with the state of those that joined.
    """

    step: int
    again: bool
    epoch: int
    rank: int
    size: int
    previous_size: int
    lost: tuple[int, ...]
    left: tuple[int, ...]
    joined: tuple[int, ...]
    seconds: float
