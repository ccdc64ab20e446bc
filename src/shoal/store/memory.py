"""A store for the threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeVar

from ..net import Deadline
from .backing import RequestExecutor
from .base import Store
from .requests import KeyTable, StoreRequest

T = TypeVar("T")


class MemoryStore(Store):
    """Keys and values in this process's memory, for ranks that are threads.

    Threads may share one object, or each use a :meth:`clone`, which has the same data.

    Args:
        timeout: default deadline in seconds; None: ``SHOAL_TIMEOUT``.
    """

    def __init__(self, timeout: float | None = None) -> None:
        super().__init__(_Memory(KeyTable(), threading.Condition()), timeout)


class _Memory(RequestExecutor):
    """A handle on a table; ``changed`` guards the table and is notified of its changes."""

    def __init__(self, table: KeyTable, changed: threading.Condition) -> None:
        super().__init__()
        self._table = table
        self._changed = changed

    def execute(self, request: StoreRequest[T], deadline: Deadline) -> T:
        with self._changed:
            result = request.apply(self._table)
            if self._table.touched:
                self._table.touched.clear()
                self._changed.notify_all()
            return result

    def watch(self, keys: Sequence[str], deadline: Deadline) -> None:
        with self._changed:
            if not self.closed.is_set() and len(self._table.missing(keys)) == len(keys):
                self._changed.wait(deadline.remaining())

    def clone(self, timeout: float) -> _Memory:
        return _Memory(self._table, self._changed)

    def close(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def __str__(self) -> str:
        return "MemoryStore"
