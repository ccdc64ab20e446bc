"""Which slots of a job are in use, and which to fill or to empty for another number of processes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from .rank import JobProcess


class Occupant(Protocol):
    """The last process of a slot.

    Attributes:
        status: None while it runs.
        leaving: it was asked to leave.
        is_member: it meets first, or has joined the others.
    """

    @property
    def status(self) -> int | None: ...
    @property
    def leaving(self) -> bool: ...
    @property
    def is_member(self) -> bool: ...


@dataclass(frozen=True)
class ScalePlan:
    """What to do to have another number of processes.

    Attributes:
        start: slots in which to start one.
        stop: slots whose process is to leave, or is not to be started any more.
        later: how many more to start, as soon as slots become free that processes leave now.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    later: int = 0


def last_of_slots(ranks: Iterable[JobProcess]) -> dict[int, JobProcess]:
    """The last process of each slot that has had one."""
    return {rank.slot: rank for rank in ranks}


def plan(
    wanted: int,
    usable: Collection[int],
    last: Mapping[int, Occupant],
    waiting: Collection[int],
    *,
    spares: int = 0,
) -> ScalePlan:
    """What to do to have ``wanted`` members and ``spares`` beyond them.

    Args:
        usable: the slots in which processes can be started, in order.
        last: the last process of each slot that has had one.
        waiting: slots that are about to get another process.

    Members stay before others do, and of those the ones in the lowest slots.  With spares, a member above
    ``wanted`` leaves although a spare stays.
    """
    running = {slot for slot, each in last.items() if each.status is None}
    members = [slot for slot in sorted(running) if last[slot].is_member and not last[slot].leaving]
    others = {slot for slot in running if not last[slot].is_member and not last[slot].leaving}
    joining = sorted(others | set(waiting))
    room = wanted + spares - len(members[:wanted])
    missing = max(0, room - len(joining))
    free = [slot for slot in usable if slot not in running and slot not in waiting]
    start = free[:missing]
    return ScalePlan(tuple(start), tuple(members[wanted:] + joining[room:]), missing - len(start))
