"""The slots of a job: restarts of failed processes, and changes of the number of processes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from .rank import JobProcess


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
    return {rank.slot: rank for rank in ranks}


def plan_scale(
    wanted: int,
    usable: Collection[int],
    last: Mapping[int, JobProcess],
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


#: seconds before the first restart of a slot, doubled by each restart, and their maximum
MIN_DELAY_S, MAX_DELAY_S = 1.0, 30.0
#: run time in seconds after which the delay of a slot is reset
RESET_AFTER_S = 300.0
#: maximum number of restarts of a slot in a window, and the window in seconds
MAX_RESTARTS, RESTART_WINDOW_S = 10, 600.0


@dataclass
class _Slot:
    delay: float = 0.0
    started: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RESTARTS))
    due: float = math.inf


class Respawn:
    """The restarts of each slot; times are in seconds of one clock."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}

    def failed(self, slot: int, lived: float, now: float) -> float | None:
        """Schedule a restart of ``slot``, whose process has failed after ``lived`` seconds; return the delay.

        There are too many restarts if it is None.
        """
        found = self._slots.setdefault(slot, _Slot())
        if len(found.started) == MAX_RESTARTS and now - found.started[0] < RESTART_WINDOW_S:
            return None
        found.delay = (
            MIN_DELAY_S if lived >= RESET_AFTER_S or not found.delay else min(2 * found.delay, MAX_DELAY_S)
        )
        found.due = now + found.delay
        return found.delay

    def next_at(self) -> float:
        """The time of the next restart; infinity: none is scheduled."""
        return min((slot.due for slot in self._slots.values()), default=math.inf)

    @property
    def waiting(self) -> set[int]:
        """The slots with a scheduled restart."""
        return {number for number, slot in self._slots.items() if slot.due < math.inf}

    def due(self, now: float) -> list[int]:
        """The slots to restart now."""
        found = []
        for number, slot in self._slots.items():
            if slot.due <= now:
                slot.due = math.inf
                slot.started.append(now)
                found.append(number)
        return found

    def cancel(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._slots[slot].due = math.inf
