"""The index of the requests that wait for keys.  It does no I/O: the server asks, and acts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class WaitIndex(Generic[T]):
    """Items that wait until all of their keys have appeared, indexed by key.

    A key that appears costs time for those that wait for it, not for all that wait.
    """

    def __init__(self) -> None:
        self._keys: dict[T, set[str]] = {}
        # A dict stands for an ordered set: the first to wait is the first to be woken.
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
