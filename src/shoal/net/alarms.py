"""Timers of an event loop."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Alarms(Generic[T]):
    """A set of timers, at most one per item."""

    def __init__(self) -> None:
        self._at: dict[T, float] = {}
        self._heap: list[tuple[float, int, T]] = []
        self._count = itertools.count()

    def set(self, item: T, at: float) -> None:
        """Set the timer of ``item`` to the time ``at``, replacing an earlier one."""
        self._at[item] = at
        heapq.heappush(self._heap, (at, next(self._count), item))

    def cancel(self, item: T) -> None:
        """Cancel the timer of ``item``."""
        self._at.pop(item, None)
        # Cancelled entries stay in the heap until they are due, or until they are most of it.
        if len(self._heap) > 2 * len(self._at) + 256:
            self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """Return the time of the next timer, None if there is none."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[T]:
        """Remove the timers that have expired at ``now``; return their items in order of time."""
        items = []
        while (at := self.next()) is not None and at <= now:
            item = heapq.heappop(self._heap)[2]
            del self._at[item]
            items.append(item)
        return items
