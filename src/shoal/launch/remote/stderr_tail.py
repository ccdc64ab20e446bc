"""The last lines of stderr of ssh or srun, for messages."""

from __future__ import annotations

from collections import deque
from typing import IO

from ...common.wording import printable
from ..ranks.source import Pipe

#: maximum number of lines, and bytes of a line
_LINES, _WIDTH = 10, 300


class StderrTail:
    """The last lines of a pipe."""

    def __init__(self, file: IO[bytes]) -> None:
        self.pipe = Pipe(file)
        self._lines: deque[bytes] = deque(maxlen=_LINES)
        self._part = b""
        self._is_closed = False

    def read(self) -> None:
        """Read the available bytes."""
        if self._is_closed:
            return  # closed in the same turn of the loop
        try:
            while data := self.pipe.read():
                *lines, self._part = (self._part + data).split(b"\n")
                self._part = self._part[-_WIDTH:]
                self._lines.extend(line[:_WIDTH] for line in lines if line.strip())
        except BlockingIOError:
            return
        self.pipe.ignore()

    @property
    def lines(self) -> list[str]:
        """The last lines, without control characters."""
        lines = [*self._lines, self._part] if self._part.strip() else list(self._lines)
        return [printable(line.decode(errors="replace").rstrip()) for line in lines]

    def close(self) -> None:
        """Read the rest, and close the pipe."""
        self.read()
        self.pipe.close()
        self._is_closed = True
