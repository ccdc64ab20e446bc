"""Output of ranks on other hosts, which the launcher writes in turns."""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable

from ...errors import WireError


class OutputRelay:
    """stdout or stderr of a rank on another host.

    Args:
        queue: the relays that have output to write, which take turns.
        taken: called with the number of bytes that were consumed.
        closed: called when the reader closes the relay before the end of the output.
    """

    def __init__(
        self, queue: deque[OutputRelay], taken: Callable[[int], None], closed: Callable[[], None]
    ) -> None:
        self._queue, self._taken, self._closed = queue, taken, closed
        self._chunks: deque[bytes] = deque()
        self._ready: Callable[[], object] | None = None
        self._is_closed = False
        #: the end of the output has come
        self.ended = False

    def feed(self, data: bytes) -> None:
        """Add received bytes; ``b""`` is the end."""
        if self.ended:
            raise WireError("it sent output after its end")
        if self._is_closed:
            self._taken(len(data))
            return
        if data:
            self._chunks.append(data)
        self.ended = not data
        self._offer()

    def read(self) -> bytes:
        if not self._chunks:
            if self.ended:
                return b""
            raise BlockingIOError
        data = self._chunks.popleft()
        self._taken(len(data))
        return data

    def listen(self, selector: selectors.BaseSelector, ready: Callable[[], object]) -> None:
        self._ready = ready
        self._offer()

    def ignore(self) -> None:
        self._ready = None

    def close(self) -> None:
        self.ignore()
        if not self._is_closed:
            self._is_closed = True
            while self._chunks:
                self._taken(len(self._chunks.popleft()))
            if not self.ended:
                self._closed()

    def turn(self) -> None:
        """Write one chunk, and wait for the next turn if there are more."""
        if self._ready is not None and (self._chunks or self.ended):
            self._ready()
            self._offer()

    def _offer(self) -> None:
        has_output = self._ready is not None and (self._chunks or self.ended)
        if has_output and self not in self._queue:
            self._queue.append(self)
