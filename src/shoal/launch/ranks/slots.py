"""The slots of a job: which to fill or empty for another number of processes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from .rank import JobProcess


class Occupant(Protocol):
    """The last process of a slot; see :class:`JobProcess`."""

    @property
    def status(self) -> int | None: ...
    @property
    def leaving(self) -> bool: ...
    @property
    def is_member(self) -> bool: ...


@dataclass(frozen=True)
class ScalePlan:
    """The actions that change the number of processes.

    Attributes:
        start: slots in which to start a process.
        stop: slots in which to end the process, or to cancel a restart.
        later: number of processes to start later, when leaving processes have freed their slots.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    later: int = 0


def last_of_slots(ranks: Iterable[JobProcess]) -> dict[int, JobProcess]:
    """The last process of each slot."""
    return {rank.slot: rank for rank in ranks}


def plan(
    wanted: int,
    usable: Collection[int],
    last: Mapping[int, Occupant],
    waiting: Collection[int],
    *,
    spares: int = 0,
) -> ScalePlan:
    """Plan the change to ``wanted`` members and ``spares`` further processes.

    Args:
        usable: the slots in which processes can be started, in order.
        last: the last process of each slot.
        waiting: slots with a scheduled restart.

    Members stay rather than other processes, and processes in low slots rather than in high slots.  With
    spares, a member above ``wanted`` leaves although a spare stays.
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
