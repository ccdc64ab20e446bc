"""A store of one's own, over a dictionary."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from shoal import Store
from shoal.store.base import checked_value, timed_out


class DictionaryStore(Store):
    """The least that a store of one's own must do: a dictionary, and a condition for those that wait."""

    tables: ClassVar[dict[str, dict[str, bytes]]] = {}
    changed: ClassVar[threading.Condition] = threading.Condition()

    def __init__(self, name: str, timeout: float | None) -> None:
        super().__init__(timeout)
        self.name = name
        self.values = self.tables.setdefault(name, {})

    def _change(self, key: str, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        with self.changed:
            value = change(self.values.pop(key, None))
            if value is not None:
                self.values[key] = value
            self.changed.notify_all()
            return value

    def set(self, key: str, value: Any) -> None:
        self._change(key, lambda _: checked_value(value))

    def get(self, key: str, timeout: float | None = None) -> bytes:
        return self.multi_get([key], timeout)[0]

    def wait(self, keys: Sequence[str], timeout: float | None = None) -> None:
        seconds = self.timeout if timeout is None else timeout
        with self.changed:
            if not self.changed.wait_for(lambda: self.check(keys), seconds):
                raise timed_out([key for key in keys if key not in self.values], seconds)

    def add(self, key: str, amount: int) -> int:
        return int(self._change(key, lambda old: b"%d" % (int(old or 0) + amount)) or 0)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        wanted = checked_value(expected)

        def change(old: bytes | None) -> bytes | None:
            return checked_value(desired) if old == wanted or (old is None and not wanted) else old

        stored = self._change(key, change)
        return wanted if stored is None else stored

    def delete(self, key: str) -> bool:
        with self.changed:
            return self.values.pop(key, None) is not None

    def check(self, keys: Sequence[str]) -> bool:
        with self.changed:
            return all(key in self.values for key in keys)

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self, prefix: str = "") -> list[str]:
        with self.changed:
            return sorted(key for key in self.values if key.startswith(prefix))

    def append(self, key: str, value: Any) -> None:
        self._change(key, lambda old: (old or b"") + checked_value(value))

    def multi_get(self, keys: Sequence[str], timeout: float | None = None) -> list[bytes]:
        with self.changed:
            self.wait(keys, timeout)
            return [self.values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def clone(self) -> DictionaryStore:
        return DictionaryStore(self.name, self.timeout)

    def close(self) -> None:
        pass
