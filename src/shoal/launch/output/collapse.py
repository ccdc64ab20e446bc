"""Merges equal lines of several ranks into one line with all of these ranks (``shoal run --collapse``).

A line is *held* until each rank has written it, at most :data:`HOLD_S`.  Then it is released: written once,
with the ranks that have written it so far.

- **Order.**  Each rank has a queue of held lines, which leave it in order.  If the line that is released is
  not the first of a queue, the lines before it are released first.
- **Repeated lines.**  A released line takes at most one line of each rank: the first equal one in its queue.
- **Progress bars and prompts** are not merged, since each belongs to one rank.  Neither is the line that ends
  one.  They are passed on at once unless the rank has held lines, which must come first.

stdout and stderr have separate instances.  Lines of different streams are not merged, and a line on one of
them can be written up to :data:`HOLD_S` later than a line that the rank wrote afterwards on the other.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

#: maximum number of seconds that a line is held
HOLD_S = 0.2
#: maximum number of held bytes; the oldest lines are released earlier
MAX_HELD_BYTES = 32 << 20
#: bytes of memory that a held line takes in addition to its text
_LINE_OVERHEAD_BYTES = 500

SourceT = TypeVar("SourceT")


@dataclass(eq=False, slots=True)
class HeldLine(Generic[SourceT]):
    """A line in the queue of its source.

    Attributes:
        key: equal for lines that may be merged.
        stamp: the time at which it was read, as a prefix.
        end: the line end; ``\\r`` for an update of a progress bar, None for an unfinished line.
        release_at: the time to release it.
        is_written: it was released.
    """

    source: SourceT
    key: object
    stamp: bytes
    text: bytes
    end: bytes | None
    release_at: float
    is_written: bool = False

    @property
    def cost(self) -> int:
        """Bytes of memory."""
        return len(self.text) + _LINE_OVERHEAD_BYTES


class LineCollapser(Generic[SourceT]):
    """Merges the lines of one stream, stdout or stderr, of all ranks.

    ``write`` writes one line of the given sources; its other arguments are those of :meth:`put`.
    """

    def __init__(self, write: Callable[[Sequence[SourceT], bytes, bytes, bytes | None], None]) -> None:
        self._write = write
        self._queues: dict[SourceT, deque[HeldLine[SourceT]]] = {}
        #: key of a held line -> number of such lines in the queue of each source
        self._holders: dict[object, Counter[SourceT]] = {}
        #: all held lines, the oldest first; lines that are written already are removed at the front only
        self._held: deque[HeldLine[SourceT]] = deque()
        self._held_bytes = 0
        #: sources whose last line is not finished
        self._drawing: set[SourceT] = set()
        #: sources that write no more, and have held lines
        self._ended: set[SourceT] = set()

    def add(self, source: SourceT) -> None:
        """Add a source; lines are held until it has written them too."""
        self._queues[source] = deque()

    def end(self, source: SourceT) -> None:
        """Handle the end of a source.  Its held lines are released later."""
        self._drawing.discard(source)
        if self._queues[source]:
            self._ended.add(source)
        else:
            del self._queues[source]

    def put(self, source: SourceT, stamp: bytes, text: bytes, end: bytes | None) -> None:
        """Take a line of a source, with the attributes of :class:`HeldLine`."""
        queue = self._queues[source]
        is_open = end is None or end == b"\r"
        mergeable = not is_open and source not in self._drawing
        if is_open:
            self._drawing.add(source)
        else:
            self._drawing.discard(source)
        if not (mergeable or queue):
            self._write([source], stamp, text, end)
            return
        key = (text, end) if mergeable else object()
        line = HeldLine(source, key, stamp, text, end, time.monotonic() + HOLD_S)
        queue.append(line)
        self._held.append(line)
        self._held_bytes += line.cost
        holders = self._holders.setdefault(key, Counter())
        holders[source] += 1
        if len(holders) == len(self._queues) and all(self._queues[each][0].key == key for each in holders):
            self._release(key)
        while self._held_bytes > MAX_HELD_BYTES:
            self.release_oldest()

    def next_release(self) -> float:
        """The time to call :meth:`release_oldest`; infinity: no line is held."""
        return self._held[0].release_at if self._held else math.inf

    def release_oldest(self) -> None:
        """Release the oldest line, and the lines that must come before it."""
        if self._held:
            self._release(self._held[0].key)

    def _release(self, key: object) -> None:
        """Write the first line ``key`` of each queue as one line, after the lines before it."""
        sources = list(self._holders[key])
        for source in sources:
            queue = self._queues[source]
            while (before := queue[0].key) != key:
                self._write_first(
                    before, [s for s in self._holders[before] if self._queues[s][0].key == before]
                )
        self._write_first(key, sources)
        while self._held and self._held[0].is_written:
            self._held_bytes -= self._held.popleft().cost

    def _write_first(self, key: object, sources: Sequence[SourceT]) -> None:
        """Write the first lines of the queues of ``sources``, all of them ``key``, as one line."""
        lines = [self._queues[source].popleft() for source in sources]
        holders = self._holders[key]
        for source, line in zip(sources, lines, strict=True):
            line.is_written = True
            holders[source] -= 1
            if not holders[source]:
                del holders[source]
            if source in self._ended and not self._queues[source]:
                self._ended.remove(source)
                del self._queues[source]
        if not holders:
            del self._holders[key]
        first = min(lines, key=lambda line: line.release_at)
        self._write(sources, first.stamp, first.text, first.end)
