"""Copies the launcher's stdin to rank 0: a reader in the launcher, and a writer next to rank 0.

Rank 0 on another host gets stdin through an agent.  On this machine rank 0 inherits stdin, except if the job
was started in the background of a terminal, where rank 0 would take the input of the shell.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from collections.abc import Callable

from ...errors import WireError
from ..agent_protocol import MAX_CHUNK_BYTES, STDIN_WINDOW_BYTES

#: seconds between two checks whether a background job has come to the foreground
POLL_INTERVAL_S = 0.25


class StdinReader:
    """Reads descriptor 0 as fast as rank 0 consumes it, and a terminal only in the foreground.

    It calls ``send`` with bytes for rank 0, and with ``b""`` at the end.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._selector: selectors.BaseSelector | None = None
        self._unacknowledged = 0
        self._ended = self._is_listening = False
        #: the time to call :meth:`tick`; infinity: not needed
        self.retry_at = math.inf

    def watch(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._listen()

    def taken(self, amount: int) -> None:
        """Record that rank 0 has consumed ``amount`` bytes; raises WireError."""
        if amount > self._unacknowledged:
            raise WireError("rank 0 acknowledged more stdin than was sent")
        self._unacknowledged -= amount
        self._listen()

    def tick(self, now: float) -> None:
        """Read the terminal again once this job is in the foreground."""
        if now >= self.retry_at:
            self._listen()

    def close(self) -> None:
        self._ended = True
        self._listen()

    def _listen(self) -> None:
        if self._selector is None:
            return
        in_background = not self._ended and is_in_background()
        self.retry_at = time.monotonic() + POLL_INTERVAL_S if in_background else math.inf
        while not in_background and self._wants_more and not self._is_listening:
            try:
                self._selector.register(0, selectors.EVENT_READ, self._read)
                self._is_listening = True
            except (PermissionError, ValueError):  # a file, which is always ready
                self._read()
        if self._is_listening and (in_background or not self._wants_more):
            self._selector.unregister(0)
            self._is_listening = False

    @property
    def _wants_more(self) -> bool:
        return not self._ended and self._unacknowledged + MAX_CHUNK_BYTES <= STDIN_WINDOW_BYTES

    def _read(self) -> None:
        if is_in_background():
            self._listen()
            return
        # If the shell puts the job into the background now, reading would stop this process.
        before = signal.signal(signal.SIGTTIN, signal.SIG_IGN)
        try:
            data = os.read(0, MAX_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        finally:
            signal.signal(signal.SIGTTIN, before)
        self._unacknowledged += len(data)
        self._ended = not data
        self._send(data)
        if self._is_listening:
            self._listen()


def is_in_background() -> bool:
    """Whether stdin is the terminal of this session, and another job is in the foreground."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # the terminal of another session, or of none
        return False


class StdinPipe:
    """Writes the launcher's stdin into the pipe of rank 0.

    It calls ``taken`` with the number of bytes that were written to the rank, or dropped.
    """

    def __init__(self, selector: selectors.BaseSelector, taken: Callable[[int], None]) -> None:
        self._selector, self._taken = selector, taken
        self._fd = -1
        self._waiting = bytearray()
        self._ended = self._is_listening = False

    def attach(self, fd: int) -> None:
        """Take ownership of ``fd`` and write to it; raises WireError if there is a descriptor already."""
        if self._fd >= 0:
            os.close(fd)
            raise WireError("stdin was requested for a second process")
        os.set_blocking(fd, False)
        self._fd = fd

    def take(self, data: bytes) -> None:
        """Add bytes, or ``b""`` for the end; raises WireError if they exceed the window."""
        if self._ended or len(self._waiting) + len(data) > STDIN_WINDOW_BYTES:
            raise WireError("it sent stdin beyond the window or after its end")
        self._ended = not data
        self._waiting += data
        self._write()

    def close(self) -> None:
        """Close the pipe: the rank reads the end of file."""
        if self._fd >= 0:
            if self._is_listening:
                self._selector.unregister(self._fd)
                self._is_listening = False
            os.close(self._fd)
            self._fd = -1

    def _write(self) -> None:
        if self._fd < 0:
            written = len(self._waiting)  # dropped
        else:
            written = 0
            try:
                if self._waiting:
                    written = os.write(self._fd, self._waiting)
            except BlockingIOError:
                pass
            except OSError:
                self.close()
                written = len(self._waiting)
        del self._waiting[:written]
        if written:
            self._taken(written)
        if self._fd >= 0 and self._ended and not self._waiting:
            self.close()
        if self._fd >= 0 and bool(self._waiting) != self._is_listening:
            self._is_listening = not self._is_listening
            if self._is_listening:
                self._selector.register(self._fd, selectors.EVENT_WRITE, self._write)
            else:
                self._selector.unregister(self._fd)
