"""The batches and waits of a node while a trace is running, as the master notes them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..node.history import MAX_TRACE_EVENTS
from .batch import SegmentBatch
from .history import SegmentOrigins
from .origin import Origin, current_origin


@dataclass(eq=False, slots=True)
class _TracedBatch:
    """A batch of `size` commands, `sent` and `done` (acknowledged) at times in nanoseconds; 0: not yet."""

    stream: int
    number: int
    issued: Sequence[SegmentOrigins]
    size: int
    sent: int
    done: int = 0


class NodeTrace:
    """The batches sent to node `index` and the master's waits for it, while a trace is running."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._size = 0
        self.batches: deque[_TracedBatch] = deque()
        self.waits: deque[tuple[int, str, Origin | None, int, int]] = deque(maxlen=MAX_TRACE_EVENTS)
        self._open: dict[SegmentBatch, _TracedBatch] = {}

    def sent(self, stream: int, batch: SegmentBatch, begun: int) -> None:
        """Note a batch sent to a stream; `begun` is the time before sending. The caller holds the lock."""
        sent = _TracedBatch(stream, batch.number, batch.origins, batch.size, begun)
        self._open[batch] = sent
        self.batches.append(sent)
        self._size += sent.size
        while self._size - self.batches[0].size >= MAX_TRACE_EVENTS:
            self._size -= self.batches.popleft().size

    def acknowledged(self, batch: SegmentBatch) -> None:
        """Note the acknowledgement of a batch; the caller holds the lock."""
        sent = self._open.pop(batch, None)
        if sent is not None:
            sent.done = time.monotonic_ns()

    def waiting(self) -> _TracedWait:
        """Return a context manager for a wait of the program for the node."""
        return _TracedWait(self)


class _TracedWait:
    # not a generator: current_origin() would return a line of contextlib
    def __init__(self, trace: NodeTrace) -> None:
        self._trace = trace
        self._begun, self._origin = time.monotonic_ns(), current_origin()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        thread = threading.current_thread()
        wait = threading.get_native_id(), thread.name, self._origin, self._begun, time.monotonic_ns()
        self._trace.waits.append(wait)
