"""Splitting the bytes of a pipe into lines and progress updates."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

_END = re.compile(rb"(\r\n|\n|\r)")

#: bytes; longer lines are split, so that a rank cannot fill the launcher's memory
MAX_LINE_BYTES = 1 << 20

#: number of last lines of a stream that the summary of a failure shows
TAIL_LINES = 20
_TAIL_WIDTH = 2000


class LineSplitter:
    """Splits a stream at ``\\n``, ``\\r\\n`` and ``\\r``.

    ``\\r`` ends an update of a line that is redrawn, such as a progress bar.

    Attributes:
        redrawing: whether the last end was a ``\\r``, so that the following text redraws the line.
        tail: the last lines, for a summary.
    """

    def __init__(self) -> None:
        self.redrawing = False
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._chunks: list[bytes] = []
        self._length = 0
        self._held = b""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Process the next bytes; yield the completed lines, each as (text, line end)."""
        data = self._held + data
        # A \r at the end may be the first half of \r\n.
        self._held = b"\r" if data.endswith(b"\r") else b""
        pieces = _END.split(data[: len(data) - len(self._held)])
        for text, end in zip(pieces[::2], pieces[1::2], strict=False):
            yield self._finish(text, end)
        if pieces[-1]:
            self._chunks.append(pieces[-1])
            self._length += len(pieces[-1])
        if self._length > MAX_LINE_BYTES:
            yield self._finish(b"", b"\n")

    @property
    def partial(self) -> bytes:
        """The bytes after the last line end."""
        return b"".join(self._chunks)

    def close(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the last line if the stream ended without a newline."""
        if self._chunks or self._held:
            yield self._finish(b"", self._held or b"\n")
            self._held = b""

    def _finish(self, text: bytes, end: bytes) -> tuple[bytes, bytes]:
        text = b"".join(self._chunks) + text
        self._chunks.clear()
        self._length = 0
        if self.redrawing and self.tail:
            self.tail.pop()
        self.redrawing = end == b"\r"
        self.tail.append(text[:_TAIL_WIDTH])
        return text, end
