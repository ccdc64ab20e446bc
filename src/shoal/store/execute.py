"""A store that needs to know only how to execute one request."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TypeVar

from ..errors import UsageError
from ..wire import Deadline
from . import requests
from .base import MAX_VALUE, Store, Value, checked_key, checked_keys, checked_value
from .requests import Request

T = TypeVar("T")


class RequestStore(Store):
    """All methods of a store in terms of :meth:`_execute`: checks arguments, makes the request."""

    @abc.abstractmethod
    def _execute(self, request: Request[T], deadline: Deadline) -> T:
        """Carry out one request before the deadline; StoreTimeout names the keys it waited for."""

    def set(self, key: str, value: Value) -> None:
        self._now(requests.Set(checked_key(key), checked_value(value)))

    def get(self, key: str, timeout: float | None = None) -> bytes:
        deadline = self._deadline(timeout)
        return self._execute(requests.Get([checked_key(key)], deadline.timeout), deadline)[0]

    def wait(self, keys: Sequence[str], timeout: float | None = None) -> None:
        deadline = self._deadline(timeout)
        self._execute(requests.Wait(checked_keys(keys), deadline.timeout), deadline)

    def add(self, key: str, amount: int) -> int:
        if not isinstance(amount, int) or not -(2**63) <= amount < 2**63:
            raise UsageError(f"cannot add {amount!r} to key {key!r}: expected a whole number of 64 bits")
        return self._now(requests.Add(checked_key(key), int(amount)))

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        return self._now(
            requests.CompareSet(checked_key(key), checked_value(expected), checked_value(desired))
        )

    def delete(self, key: str) -> bool:
        return self._now(requests.Delete(checked_key(key)))

    def check(self, keys: Sequence[str]) -> bool:
        return self._now(requests.Check(checked_keys(keys)))

    def num_keys(self) -> int:
        return self._now(requests.NumKeys())

    def list_keys(self, prefix: str = "") -> list[str]:
        return self._now(requests.ListKeys(checked_key(prefix)))

    def append(self, key: str, value: Value) -> None:
        self._now(requests.Append(checked_key(key), checked_value(value)))

    def multi_get(self, keys: Sequence[str], timeout: float | None = None) -> list[bytes]:
        deadline = self._deadline(timeout)
        rest = checked_keys(keys)
        values: list[bytes] = []
        while rest:
            # A reply holds as many values as fit into a message.
            part = self._execute(requests.Get(rest, deadline.remaining()), deadline)
            values += part
            rest = rest[len(part) :]
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        checked = checked_keys(keys)
        if len(checked) != len(values):
            raise UsageError(f"{len(checked)} keys and {len(values)} values: expected one value for each key")
        items: list[tuple[str, bytes]] = []
        total = 0
        for key, value in zip(checked, map(checked_value, values), strict=True):
            if total + len(value) > MAX_VALUE:
                self._now(requests.MultiSet(items))
                items, total = [], 0
            items.append((key, value))
            total += len(value)
        self._now(requests.MultiSet(items))

    def _now(self, request: Request[T]) -> T:
        return self._execute(request, Deadline(self.timeout))

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.timeout if timeout is None else timeout)
