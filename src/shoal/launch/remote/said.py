"""What a program that leads to other hosts, such as ssh, writes to stderr: its last lines, for messages."""

from __future__ import annotations

from collections import deque
from typing import IO

from ...common.wording import printable
from ..ranks.source import Pipe

#: lines that are kept, and characters of a line
_LINES, _WIDTH = 10, 300


class Said:
    """The last lines of a pipe.

    Attributes:
        pipe: where they come from.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.pipe = Pipe(file)
        self._lines: deque[bytes] = deque(maxlen=_LINES)
        self._part = b""
        self._is_closed = False

    def hear(self) -> None:
        """Read what is there."""
        if self._is_closed:
            return  # both ends of the process became ready at once
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
        """The last lines, without what a terminal would act on."""
        lines = [*self._lines, self._part] if self._part.strip() else list(self._lines)
        return [printable(line.decode(errors="replace").rstrip()) for line in lines]

    def close(self) -> None:
        """Read what is left, and close the pipe."""
        self.hear()
        self.pipe.close()
        self._is_closed = True
