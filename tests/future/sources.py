"""Engines in miniature."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shoal.future.state import Latch


class ManualSource:
    """A source that a test completes; it notifies from a thread of its own, as engines do."""

    def __init__(self) -> None:
        self._done = Latch()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
        self.entered = threading.Event()
        self.timeouts: list[float | None] = []

    def complete(self, error: BaseException | None = None) -> None:
        """Complete the operation and return when every listener was called."""
        with self._lock:
            self._error = error
            self._done.set()
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            self._dispatch(listener)

    def wait(self, timeout: float | None) -> bool:
        self.timeouts.append(timeout)
        self.entered.set()
        return self._done.wait(timeout)

    def done(self) -> bool:
        return self._done.is_set()

    def exception(self) -> BaseException | None:
        assert self._done.is_set()
        return self._error

    def notify(self, fn: Callable[[], None]) -> None:
        with self._lock:
            if not self._done.is_set():
                self._listeners.append(fn)
                return
        self._dispatch(fn)

    def _dispatch(self, fn: Callable[[], None]) -> None:
        thread = threading.Thread(target=fn, name="dispatcher")
        thread.start()
        thread.join()


class InstantSource:
    """An operation that is complete by the time anybody asks."""

    def wait(self, timeout: float | None) -> bool:
        return True

    def done(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def notify(self, fn: Callable[[], None]) -> None:
        thread = threading.Thread(target=fn)
        thread.start()
        thread.join()
