"""Output of ranks on other hosts, which the launcher writes in turns."""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable

from ...errors import WireError


class RelayQueue:
    """A queue of relays that have output to write.

    Writing short lines takes longer than receiving them, and must not delay exits and heartbeats.
    """

    def __init__(self) -> None:
        self._queue: deque[OutputRelay] = deque()

    def add(self, relay: OutputRelay) -> None:
        if relay not in self._queue:
            self._queue.append(relay)

    def take(self, until: float) -> None:
        """Write one chunk of each relay in turn, until the time ``until``."""
        while self._queue:
            self._queue.popleft().turn()
            if time.monotonic() >= until:
                break

    def __bool__(self) -> bool:
        return bool(self._queue)


class OutputRelay:
    """stdout or stderr of a rank on another host.

    Args:
        turns: the queue for relays that have output.
        taken: called with the number of bytes that were consumed.
        closed: called when the reader closes the relay before the end of the output.
    """

    def __init__(
        self, relay_queue: RelayQueue, taken: Callable[[int], None], closed: Callable[[], None]
    ) -> None:
        self._relay_queue, self._taken, self._closed = relay_queue, taken, closed
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
        if self._ready is not None and (self._chunks or self.ended):
            self._ready()
            self._offer()

    def _offer(self) -> None:
        if self._ready is not None and (self._chunks or self.ended):
            self._relay_queue.add(self)
