"""The index of the requests that wait for keys. It does no I/O."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class WaitIndex(Generic[T]):
    """Items that wait until all of their keys exist, indexed by key.

    The cost of a new key depends on the number of items that wait for it, not on that of all items.
    """

    def __init__(self) -> None:
        self._keys: dict[T, set[str]] = {}
        # A dict used as an ordered set: items are woken in the order in which they began to wait.
        self._items: dict[str, dict[T, None]] = {}

    def add(self, item: T, keys: Iterable[str]) -> None:
        """Let ``item`` wait for ``keys``, at least one."""
        self._keys[item] = set(keys)
        for key in self._keys[item]:
            self._items.setdefault(key, {})[item] = None

    def appeared(self, key: str) -> list[T]:
        """Record that ``key`` exists; remove and return the items that wait for no other key."""
        ready = []
        for item in self._items.pop(key, ()):
            keys = self._keys[item]
            keys.discard(key)
            if not keys:
                del self._keys[item]
                ready.append(item)
        return ready

    def remove(self, item: T) -> None:
        """Remove ``item`` if it waits."""
        for key in self._keys.pop(item, ()):
            items = self._items[key]
            del items[item]
            if not items:
                del self._items[key]

    def __len__(self) -> int:
        return len(self._keys)
