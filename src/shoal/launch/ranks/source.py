"""Sources of a rank's output: a pipe of this process, or an agent on another host."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Protocol

#: maximum number of bytes to read from a source before other sources are read
CHUNK = 1 << 16


class OutputSource(Protocol):
    """stdout or stderr of one rank; no method blocks."""

    def read(self) -> bytes:
        """Return the next bytes, ``b""`` at the end; raises BlockingIOError if there are none now."""

    def listen(self, selector: selectors.BaseSelector, ready: Callable[[], object]) -> None:
        """Call ``ready`` in the loop of ``selector`` while there are bytes to read."""

    def ignore(self) -> None:
        """Undo :meth:`listen`; may be called twice."""

    def close(self) -> None:
        """Close the source: a rank that continues to write gets SIGPIPE."""


class Pipe:
    """The read end of a pipe."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._selector: selectors.BaseSelector | None = None
        os.set_blocking(file.fileno(), False)

    def read(self) -> bytes:
        return os.read(self._file.fileno(), CHUNK)

    def listen(self, selector: selectors.BaseSelector, ready: Callable[[], object]) -> None:
        selector.register(self._file, selectors.EVENT_READ, ready)
        self._selector = selector

    def ignore(self) -> None:
        if self._selector is not None:
            with suppress(KeyError):
                self._selector.unregister(self._file)
            self._selector = None

    def close(self) -> None:
        if not self._file.closed:
            self.ignore()
            self._file.close()
