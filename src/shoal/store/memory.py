"""A store for the threads of one process."""

from __future__ import annotations

import threading
from typing import TypeVar

from ..errors import StoreError
from ..wire import Deadline
from .base import timed_out
from .execute import RequestStore
from .requests import Blocking, Request, Table

T = TypeVar("T")


class MemoryStore(RequestStore):
    """Keys and values in this process's memory, for ranks that are threads.

    Threads may share one object, or each take a :meth:`clone`, which sees the same data.

    Args:
        timeout: default deadline in seconds; ``SHOAL_TIMEOUT`` unless given.
    """

    def __init__(self, timeout: float | None = None) -> None:
        super().__init__(timeout)
        self._table = Table()
        self._changed = threading.Condition()
        self._closed = False

    def clone(self) -> MemoryStore:
        """Another handle on the same data; closing one leaves the other."""
        self._refuse_forked()
        other = MemoryStore(self.timeout)
        other._table = self._table
        other._changed = self._changed
        return other

    def close(self) -> None:
        """Close this handle and wake the threads that wait in it."""
        if not self._forked():
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def _execute(self, request: Request[T], deadline: Deadline) -> T:
        self._refuse_forked()
        with self._changed:
            self._refuse_closed()
            if isinstance(request, Blocking):
                while missing := self._table.missing(request.keys):
                    if deadline.expired:
                        raise timed_out(missing, deadline.timeout)
                    self._changed.wait(deadline.remaining())
                    self._refuse_closed()
            result = request.apply(self._table)
            if self._table.touched:
                self._table.touched.clear()
                self._changed.notify_all()
            return result

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreError("this MemoryStore has been closed")
