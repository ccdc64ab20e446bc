"""Sources of output: a pipe of this process, or an agent on another host."""

from __future__ import annotations

import os
import selectors
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Protocol

from ...common.formatting import printable

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


#: maximum number of lines, and bytes of a line
_LINES, _WIDTH = 10, 300


class StderrTail:
    """The last lines of a pipe."""

    def __init__(self, file: IO[bytes]) -> None:
        self._pipe = Pipe(file)
        self._lines: deque[bytes] = deque(maxlen=_LINES)
        self._part = b""
        self._is_closed = False

    def watch(self, selector: selectors.BaseSelector | None) -> None:
        """Read in the loop of ``selector``; None: in no loop."""
        self._pipe.ignore()
        if selector is not None:
            self._pipe.listen(selector, self.read)

    def read(self) -> None:
        if self._is_closed:
            return  # closed in the same turn of the loop
        try:
            while data := self._pipe.read():
                *lines, self._part = (self._part + data).split(b"\n")
                self._part = self._part[-_WIDTH:]
                self._lines.extend(line[:_WIDTH] for line in lines if line.strip())
        except BlockingIOError:
            return
        self._pipe.ignore()

    @property
    def lines(self) -> list[str]:
        """The last lines, without control characters."""
        lines = [*self._lines, self._part] if self._part.strip() else list(self._lines)
        return [printable(line.decode(errors="replace").rstrip()) for line in lines]

    def close(self) -> None:
        """Read the rest, and close the pipe."""
        self.read()
        self._pipe.close()
        self._is_closed = True
