"""Delays before failed processes are replaced: ``shoal run --respawn``."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

#: seconds before the first restart of a slot, doubled by each restart, and their maximum
MIN_DELAY_S, MAX_DELAY_S = 1.0, 30.0
#: run time in seconds after which the delay of a slot is reset
RESET_AFTER_S = 300.0
#: maximum number of restarts of a slot in a window, and the window in seconds
MOST, WINDOW = 10, 600.0


@dataclass
class _Slot:
    delay: float = 0.0
    started: deque[float] = field(default_factory=lambda: deque(maxlen=MOST))
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
        if len(found.started) == MOST and now - found.started[0] < WINDOW:
            return None
        found.delay = (
            MIN_DELAY_S if lived >= RESET_AFTER_S or not found.delay else min(2 * found.delay, MAX_DELAY_S)
        )
        found.due = now + found.delay
        return found.delay

    def next(self) -> float | None:
        """The time of the next restart, if any."""
        due = min((slot.due for slot in self._slots.values()), default=math.inf)
        return None if due == math.inf else due

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
        """Cancel the scheduled restarts of ``slots``."""
        for slot in slots:
            self._slots[slot].due = math.inf
