"""When a slot whose process has failed gets another one: ``shoal run --respawn``."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

#: seconds before the first restart of a slot; each restart doubles them, up to the longest
SHORTEST, LONGEST = 1.0, 30.0
#: seconds after which a process has settled: when it fails, its slot begins with the shortest wait again
SETTLED = 300.0
#: so many restarts of a slot in so many seconds, and no more
MOST, WINDOW = 10, 600.0


@dataclass
class _Slot:
    delay: float = 0.0
    started: deque[float] = field(default_factory=lambda: deque(maxlen=MOST))
    due: float = math.inf


class Respawn:
    """The restarts of each slot.  Times are in seconds of one clock."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}

    def failed(self, slot: int, lived: float, now: float) -> float | None:
        """The process of ``slot`` has failed after so many seconds.

        Returns:
            How long the slot waits for the next one; None: it gets none any more.
        """
        found = self._slots.setdefault(slot, _Slot())
        if len(found.started) == MOST and now - found.started[0] < WINDOW:
            return None
        found.delay = SHORTEST if lived >= SETTLED or not found.delay else min(2 * found.delay, LONGEST)
        found.due = now + found.delay
        return found.delay

    def next(self) -> float | None:
        """When :meth:`due` has something to give."""
        due = min((slot.due for slot in self._slots.values()), default=math.inf)
        return None if due == math.inf else due

    @property
    def waiting(self) -> set[int]:
        """The slots that wait."""
        return {number for number, slot in self._slots.items() if slot.due < math.inf}

    def due(self, now: float) -> list[int]:
        """The slots whose wait is over."""
        found = []
        for number, slot in self._slots.items():
            if slot.due <= now:
                slot.due = math.inf
                slot.started.append(now)
                found.append(number)
        return found

    def cancel(self, slots: Iterable[int]) -> None:
        """These slots wait no more."""
        for slot in slots:
            self._slots[slot].due = math.inf
