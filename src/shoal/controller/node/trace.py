"""A node's half of ``Master.trace``: the times of executed commands."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from ..protocol.commands import Definition
from .history import named

#: number of last commands of a node, and of batched commands and waits of the master, that a trace keeps
MOST = 200_000

#: stream, batch, segment in it, position among its numbers, name, begin and end in nanoseconds
Event = tuple[int, int, int, int, str, int, int]


class RunningBatch(Protocol):
    """The batch that a stream executes; see :class:`.outcome.BatchReply`."""

    stream: int
    batch: int
    segment: int


class Timing:
    """The times of the commands of all streams of a session."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MOST)
        self._count = 0
        self._lock = threading.Lock()

    def timed(
        self, running: RunningBatch, calls: Mapping[int, Any], definitions: Mapping[int, Definition]
    ) -> _Timed:
        """Wrap the calls of a space so that each records its time."""
        return _Timed(self, running, calls, definitions)

    def note(self, running: RunningBatch, position: int, name: str, begun: int) -> None:
        """Record a command that began at `begun` and ends now."""
        event = (
            running.stream, running.batch, running.segment, position, name, begun, time.monotonic_ns(),
        )  # fmt: skip
        with self._lock:
            self._count += 1
            self._events.append(event)

    def told(self) -> tuple[list[Event], int]:
        """Return the events, and the number of dropped older ones."""
        with self._lock:
            return list(self._events), self._count - len(self._events)


class _Timed:
    def __init__(
        self,
        timing: Timing,
        running: RunningBatch,
        calls: Mapping[int, Any],
        definitions: Mapping[int, Definition],
    ) -> None:
        self._timing = timing
        self._running = running
        self._calls = calls
        self._definitions = definitions

    def __getitem__(self, number: int) -> tuple[Any, int, int]:
        run, width, used = self._calls[number]
        return partial(self._run, run, number), width, used

    def _run(self, run: Any, number: int, t: list[Any], a: Any, p: int, s: Any, q: int) -> None:
        name, begun = named(number, self._definitions), time.monotonic_ns()
        try:
            run(t, a, p, s, q)
        finally:
            self._timing.note(self._running, p, name, begun)


def now() -> int:
    """Return this process's clock in nanoseconds."""
    return time.monotonic_ns()
