"""Who waits for which keys, and who must be woken when.  Free of I/O: the server asks, and acts."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Waiting(Generic[T]):
    """Items that wait until all of their keys have appeared, indexed by key.

    A key that appears costs time for those that wait for it, not for all that wait.
    """

    def __init__(self) -> None:
        self._keys: dict[T, set[str]] = {}
        # A dict stands for an ordered set: who waited first is woken first.
        self._items: dict[str, dict[T, None]] = {}

    def add(self, item: T, keys: Iterable[str]) -> None:
        """Let ``item`` wait for ``keys``, of which there is at least one."""
        self._keys[item] = set(keys)
        for key in self._keys[item]:
            self._items.setdefault(key, {})[item] = None

    def appeared(self, key: str) -> list[T]:
        """Note that ``key`` exists; the items that now wait for nothing any more (they are removed)."""
        ready = []
        for item in self._items.pop(key, ()):
            keys = self._keys[item]
            keys.discard(key)
            if not keys:
                del self._keys[item]
                ready.append(item)
        return ready

    def remove(self, item: T) -> None:
        """Forget ``item``, whether it waits or not."""
        for key in self._keys.pop(item, ()):
            items = self._items[key]
            del items[item]
            if not items:
                del self._items[key]

    def __len__(self) -> int:
        return len(self._keys)


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
