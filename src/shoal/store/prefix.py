"""A view of a store in which every key has a prefix, so that users of one store do not meet."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Store, Value, checked_key, checked_keys
from .foreign import adopt


class PrefixStore(Store):
    """Sees and touches only the keys ``prefix/...`` of another store.

    It has no connection of its own: :meth:`close` closes the store below, so of several views of
    one store only the owner of that store should be closed.  Errors name full keys, prefix
    included.

    Args:
        prefix: what comes before every key, without the slash.
        store: where the data is: a store, or one of ``torch.distributed`` (see :func:`adopt`).
    """

    def __init__(self, prefix: str, store: object) -> None:
        self._store = adopt(store)
        super().__init__(self._store.timeout)
        self._start = checked_key(prefix) + "/"

    @property
    def prefix(self) -> str:
        """What comes before every key, without the slash."""
        return self._start[:-1]

    @property
    def store(self) -> Store:
        """The store below."""
        return self._store

    def set(self, key: str, value: Value) -> None:
        self._store.set(self._full(key), value)

    def get(self, key: str, timeout: float | None = None) -> bytes:
        return self._store.get(self._full(key), self._seconds(timeout))

    def wait(self, keys: Sequence[str], timeout: float | None = None) -> None:
        self._store.wait(self._all(keys), self._seconds(timeout))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._full(key), amount)

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        return self._store.compare_set(self._full(key), expected, desired)

    def delete(self, key: str) -> bool:
        return self._store.delete(self._full(key))

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(self._all(keys))

    def num_keys(self) -> int:
        """The number of keys that have the prefix."""
        return len(self._store.list_keys(self._start))

    def list_keys(self, prefix: str = "") -> list[str]:
        return [key[len(self._start) :] for key in self._store.list_keys(self._full(prefix))]

    def append(self, key: str, value: Value) -> None:
        self._store.append(self._full(key), value)

    def multi_get(self, keys: Sequence[str], timeout: float | None = None) -> list[bytes]:
        return self._store.multi_get(self._all(keys), self._seconds(timeout))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        self._store.multi_set(self._all(keys), values)

    def clone(self) -> PrefixStore:
        """The same view of a clone of the store below."""
        other = PrefixStore(self.prefix, self._store.clone())
        other.timeout = self.timeout
        return other

    def close(self) -> None:
        """Close the store below."""
        self._store.close()

    def _full(self, key: str) -> str:
        return self._start + checked_key(key)

    def _all(self, keys: Sequence[str]) -> list[str]:
        return [self._start + key for key in checked_keys(keys)]

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout
