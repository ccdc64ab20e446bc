"""The launcher's stdin, on its way to rank 0 on another host."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable

from ..errors import WireError
from .frames import MOST_BYTES, STDIN_WINDOW


class Stdin:
    """Reads descriptor 0 as fast as rank 0 takes what it has.

    Args:
        send: called with bytes for rank 0, none at the end.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._selector: selectors.BaseSelector | None = None
        self._under_way = 0
        self._is_over = self._listens = False

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Read in the loop of ``selector``."""
        self._selector = selector
        self._listen()

    def taken(self, amount: int) -> None:
        """Rank 0 has taken so many bytes; raises WireError."""
        if amount > self._under_way:
            raise WireError("rank 0 has taken more of stdin than there was")
        self._under_way -= amount
        self._listen()

    def close(self) -> None:
        """Read no more."""
        self._is_over = True
        self._listen()

    def _listen(self) -> None:
        if self._selector is None:
            return
        wanted = not self._is_over and self._under_way + MOST_BYTES <= STDIN_WINDOW
        while wanted and not self._listens:
            try:
                self._selector.register(0, selectors.EVENT_READ, self._read)
                self._listens = True
            except (PermissionError, ValueError):  # a file, which is always ready
                self._read()
                wanted = not self._is_over and self._under_way + MOST_BYTES <= STDIN_WINDOW
        if self._listens and not wanted:
            self._selector.unregister(0)
            self._listens = False

    def _read(self) -> None:
        data = b""
        if os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp():
            self._is_over = True  # in the background the terminal is not ours to read
            self._listen()
            return
        # A job that the shell puts into the background just now would be stopped for reading.
        before = signal.signal(signal.SIGTTIN, signal.SIG_IGN)
        try:
            data = os.read(0, MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        finally:
            signal.signal(signal.SIGTTIN, before)
        self._under_way += len(data)
        self._is_over = not data
        self._send(data)
        if self._listens:
            self._listen()
