"""An event whose wait can be interrupted by Ctrl-C."""

from __future__ import annotations

import threading
from contextlib import suppress


class Latch:
    """Like ``threading.Event``, but ``wait`` is a single C call.

    Ctrl-C inside ``wait`` of ``threading.Event`` or ``Condition`` can raise RuntimeError, because the lock
    that they released is then not held.
    """

    __slots__ = ("_is_set", "_shut")

    def __init__(self) -> None:
        self._is_set = False
        self._shut = threading.Lock()
        self._shut.acquire()

    def set(self, *_: object) -> None:
        """Wake all waiting threads; later waits return at once.  Can be used as a subscriber of a future."""
        self._is_set = True
        with suppress(RuntimeError):  # already set
            self._shut.release()

    def clear(self) -> None:
        """Make later waits block until the next :meth:`set`.  No thread may be waiting."""
        self._is_set = False
        self._shut.acquire(blocking=False)

    def is_set(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the latch is set, for at most ``timeout`` seconds; return whether it is set."""
        if not self._is_set:
            seconds = -1 if timeout is None else max(0.0, min(timeout, threading.TIMEOUT_MAX))
            if self._shut.acquire(timeout=seconds):
                self.set()  # for the next waiting thread
        return self._is_set
