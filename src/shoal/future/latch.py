"""An event for threads that Ctrl-C may interrupt."""

from __future__ import annotations

import threading
from contextlib import suppress


class Latch:
    """As ``threading.Event``, but waited for by one call of C.

    A Ctrl-C between two lines of the wait of ``threading.Event`` or ``Condition`` raises RuntimeError: the
    lock that they let go of is not held then.
    """

    __slots__ = ("_is_set", "_shut")

    def __init__(self) -> None:
        self._is_set = False
        self._shut = threading.Lock()
        self._shut.acquire()

    def set(self, *_: object) -> None:
        """Wake who waits, now and from now on.  It may be a subscriber of a future."""
        self._is_set = True
        with suppress(RuntimeError):  # it was set already
            self._shut.release()

    def clear(self) -> None:
        """Let who waits from now on wait for the next :meth:`set`; not while any thread waits."""
        self._is_set = False
        self._shut.acquire(blocking=False)

    def is_set(self) -> bool:
        """Whether nobody would wait."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for ``timeout`` seconds at most; whether it is."""
        if not self._is_set:
            seconds = -1 if timeout is None else max(0.0, min(timeout, threading.TIMEOUT_MAX))
            if self._shut.acquire(timeout=seconds):
                self.set()  # for the next one that waits
        return self._is_set
