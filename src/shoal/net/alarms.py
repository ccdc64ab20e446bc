"""Moments at which something is to be done, for one loop that waits for the next of them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Alarms(Generic[T]):
    """At most one moment for each item."""

    def __init__(self) -> None:
        self._at: dict[T, float] = {}
        self._heap: list[tuple[float, int, T]] = []
        self._count = itertools.count()

    def set(self, item: T, at: float) -> None:
        """Ring for ``item`` at the moment ``at``, and not when it was to ring before."""
        self._at[item] = at
        heapq.heappush(self._heap, (at, next(self._count), item))

    def cancel(self, item: T) -> None:
        """Do not ring for ``item``."""
        self._at.pop(item, None)
        # Cancelled entries stay in the heap until they come up, or until they are most of it.
        if len(self._heap) > 2 * len(self._at) + 256:
            self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """The moment of the next alarm, None if there is none."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[T]:
        """The items whose moment has come, in its order; they will not ring again."""
        items = []
        while (at := self.next()) is not None and at <= now:
            item = heapq.heappop(self._heap)[2]
            del self._at[item]
            items.append(item)
        return items
