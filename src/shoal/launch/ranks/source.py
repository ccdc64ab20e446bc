"""Where the bytes that a rank writes come from: a pipe of this process, or an agent on another host."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Protocol

#: bytes that are read at once, before other sources get their turn
CHUNK = 1 << 16


class OutputSource(Protocol):
    """stdout or stderr of one rank; nothing here blocks."""

    def read(self) -> bytes:
        """The next bytes, ``b""`` at the end.  BlockingIOError: nothing is there now."""

    def listen(self, selector: selectors.BaseSelector, ready: Callable[[], object]) -> None:
        """Have ``ready`` called in the loop of ``selector`` while there is something to read."""

    def ignore(self) -> None:
        """Stop that; may be called twice."""

    def close(self) -> None:
        """Read no more: a rank that goes on writing gets SIGPIPE."""


class Pipe:
    """The reading end of a pipe."""

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
