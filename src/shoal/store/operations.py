"""The operations of a store on its keys: each in terms of three, and all of them on a dictionary."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..errors import StoreError

C = TypeVar("C")
R = TypeVar("R")

#: longest value in bytes
MAX_VALUE = 64 * 2**20

#: counters are in the range from -_MOST to _MOST - 1
_COUNTER_LIMIT = 2**63


class ValueRefused(StoreError):
    """The old or new value of a key does not permit the operation; nothing was changed."""


class KeysMissing(Exception):
    """A request cannot be executed until these keys exist."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(keys)
        self.keys = keys


class Operations(abc.ABC):
    """All operations on keys, in terms of the three abstract ones.

    A subclass overrides the operations that it can do in fewer steps.
    """

    #: longest value in bytes
    longest_value: int = MAX_VALUE

    @abc.abstractmethod
    def get_now(self, key: str) -> bytes | None:
        """Return the value of ``key``; None if it does not exist."""

    @abc.abstractmethod
    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        """Set ``key`` to ``value`` if its value is ``held``, in one atomic step.

        None stands for a missing key: ``held=None`` creates the key, ``value=None`` removes it.

        Returns:
            whether ``value`` was stored; False: the key has another value.
        """

    @abc.abstractmethod
    def list_keys(self, prefix: str) -> Sequence[str]:
        """Return the keys that start with ``prefix``, in any order."""

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Return the values of ``keys``, or of at least one of the first ones if all would be too long."""
        return [self.get_now(key) for key in keys]

    def peek(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Like :meth:`get_many`, for keys that may be missing or be removed meanwhile."""
        return self.get_many(keys)

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return those of ``keys`` that do not exist."""
        return [key for key in keys if self.get_now(key) is None]

    def count(self, prefix: str) -> int:
        """Return the number of keys that start with ``prefix``."""
        return len(self.list_keys(prefix))

    def set(self, key: str, value: bytes) -> None:
        """Set ``key`` to ``value``, whatever its value was."""
        self._change(key, lambda held: value)

    def set_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Set several values, in one step if the store can do that."""
        for key, value in items:
            self.set(key, value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """See :meth:`shoal.store.Store.compare_set`."""
        _, value = self._change(key, lambda held: desired if (held or b"") == expected else held)
        return expected if value is None else value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the sum; StoreError if the value is not a counter."""

        def total(held: bytes | None) -> bytes:
            found = counted(key, held, amount)
            return held if held is not None and amount == 0 else b"%d" % found

        return int(self._change(key, total)[1] or 0)

    def append(self, key: str, value: bytes) -> None:
        """Append ``value`` to the value of ``key``; StoreError if it becomes too long."""

        def joined(held: bytes | None) -> bytes:
            whole = (held or b"") + value
            check_length(key, whole, self.longest_value)
            return whole

        self._change(key, joined)

    def delete(self, key: str) -> bool:
        """Remove ``key`` and return whether it existed."""
        held, _ = self._change(key, lambda held: None)
        return held is not None

    def delete_prefix(self, prefix: str) -> int:
        """Remove the keys that start with ``prefix`` and return their number."""
        return sum(self.delete(key) for key in self.list_keys(prefix))

    def together(self, calls: Sequence[C], one_by_one: Callable[[Operations, Sequence[C]], R]) -> R:
        """Make several calls, in one step if the store can do that.

        Args:
            calls: requests that each change the key ``key``.
            one_by_one: executes the calls in order on the operations that it is given.
        """
        return one_by_one(self, calls)

    def _change(
        self, key: str, value_of: Callable[[bytes | None], bytes | None]
    ) -> tuple[bytes | None, bytes | None]:
        """Replace the value of ``key`` by ``value_of`` that value; return the old and the new value."""
        refusals = 0
        while True:
            held = self._held(key)
            value = value_of(held)
            if value is held or self.swap(key, held, value):
                return held, value
            refusals += 1
            self.refused(key, refusals)

    def refused(self, key: str, times: int) -> None:
        """Called after the ``times``-th failed :meth:`swap` of one call; may raise to stop the attempts."""

    def _held(self, key: str) -> bytes | None:
        """Return the value of ``key`` and check its type: :meth:`swap` would never match another type."""
        value = self.get_now(key)
        if value is None or isinstance(value, bytes):
            return value
        raise StoreError(
            f"{type(self).__name__}.get_now({key!r}) returned {type(value).__name__}, not bytes or None"
        )


class KeyTable(Operations):
    """Keys and values in a dictionary, for one thread at a time.

    Attributes:
        values: the data.
        touched: keys that were set or removed since the owner last cleared the list.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.touched: list[str] = []

    def get_now(self, key: str) -> bytes | None:
        return self.values.get(key)

    def swap(self, key: str, held: bytes | None, value: bytes | None) -> bool:
        if self.values.get(key) != held:
            return False
        if value is None:
            self.values.pop(key, None)
            self.touched.append(key)
        else:
            self.set(key, value)
        return True

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        held = self.values.get(key)
        if (held or b"") != expected:
            return expected if held is None else held
        if held != desired:
            self.set(key, desired)
        return desired

    def add(self, key: str, amount: int) -> int:
        held = self.values.get(key)
        total = counted(key, held, amount)
        if amount or held is None:
            self.set(key, b"%d" % total)
        return total

    def list_keys(self, prefix: str) -> list[str]:
        return [key for key in self.values if key.startswith(prefix)]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of the first keys: as many as fit into one message, at least one."""
        values: list[bytes | None] = []
        total = 0
        for key in keys:
            value = self.values.get(key)
            total += len(value or b"")
            if values and total > MAX_VALUE:
                break
            values.append(value)
        return values

    def missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key not in self.values]

    def count(self, prefix: str) -> int:
        return len(self.list_keys(prefix)) if prefix else len(self.values)

    def set(self, key: str, value: bytes) -> None:
        check_length(key, value, self.longest_value)
        self.values[key] = value
        self.touched.append(key)

    def set_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        for key, value in items:
            check_length(key, value, self.longest_value)
        super().set_many(items)


def counted(key: str, held: bytes | None, amount: int) -> int:
    """Return ``held`` plus ``amount``. StoreError if it is not a counter, or the sum exceeds 64 bits."""
    held = b"0" if held is None else held
    if not held.removeprefix(b"-").isdigit() or len(held) > 20:
        raise ValueRefused(f"cannot add to key {key!r}: it holds {held[:40]!r}, which is no counter")
    total = int(held) + amount
    if not -_COUNTER_LIMIT <= total < _COUNTER_LIMIT:
        raise ValueRefused(f"cannot add {amount} to key {key!r}: {total} does not fit in 64 bits")
    return total


def check_length(key: str, value: bytes, longest: int) -> None:
    """Raise StoreError if ``value`` is longer than the store permits."""
    if len(value) > longest:
        raise too_long(key, len(value), longest)


def too_long(key: str, length: int, longest: int) -> ValueRefused:
    """Return the error for a value of ``length`` bytes."""
    return ValueRefused(f"key {key!r}: {length} bytes, this store takes at most {longest} in a value")
