"""The event for a change of a session's group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resize:
    """A change of the session's group.

    Attributes:
        step: number of the next step, the first to run in the new group.
        again: whether that step had begun in the old group.
        epoch: epoch of the new group.
        rank: rank of this process in the new group.
        size: size of the new group.
        previous_size: size of the old group.
        lost: ranks of the old group that were lost, ascending.
        left: ranks of the old group that have left it, ascending.
        joined: ranks of the new group that were not in the old one, ascending.
        seconds: duration for which this rank did not train, from the error, or the end of the step before, to
            the new group, including the transfer of the state to ranks that joined.
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
