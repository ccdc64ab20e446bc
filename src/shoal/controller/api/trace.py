"""``Master.trace``: a timeline of master and nodes, in a file for Perfetto and Chrome."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ...common.atomic_file import AtomicFile
from ...common.copy_refusal import refuses_copies
from ...errors import ShoalError, UsageError
from ..commands.batch import SegmentBatch
from ..commands.history import Issued
from ..commands.issuing import Origin, issuing_line, shown
from ..commands.line import NodeConnection
from ..commands.space import Space
from ..node import between
from ..node.sessions import begin_timing, end_timing
from ..node.trace import MOST, Event, now
from .functions import PendingFunction, payload_of

#: number of calls to read a node's clock; the fastest one is used
_READS = 8
#: held while a trace is running
_running = threading.Lock()
#: commands that wait for another stream of the node, or for another node
_WAITS = ("wait", "expect")
_COPIES = (f"{between.NAMESPACE}.send", f"{between.NAMESPACE}.receive")


class _Sent:
    """A batch of `size` commands, `sent` and `done` (acknowledged) at times in nanoseconds; 0: not yet."""

    __slots__ = ("done", "issued", "number", "sent", "size", "stream")

    def __init__(self, stream: int, batch: SegmentBatch, begun: int) -> None:
        self.stream = stream
        self.number = batch.number
        self.issued: Sequence[Issued] = batch.origins
        self.size = batch.size
        self.sent, self.done = begun, 0


class NodeTrace:
    """The batches sent to node `index` and the master's waits for it, while a trace is running."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._size = 0
        self.batches: deque[_Sent] = deque()
        self.waits: deque[tuple[int, str, Origin | None, int, int]] = deque(maxlen=MOST)
        self._open: dict[SegmentBatch, _Sent] = {}

    def sent(self, stream: int, batch: SegmentBatch, begun: int) -> None:
        """Note a batch sent to a stream; `begun` is the time before sending. The caller holds the lock."""
        sent = self._open[batch] = _Sent(stream, batch, begun)
        self.batches.append(sent)
        self._size += sent.size
        while self._size - self.batches[0].size >= MOST:
            self._size -= self.batches.popleft().size

    def acknowledged(self, batch: SegmentBatch) -> None:
        """Note the acknowledgement of a batch; the caller holds the lock."""
        sent = self._open.pop(batch, None)
        if sent is not None:
            sent.done = time.monotonic_ns()

    def waiting(self) -> _Waiting:
        """Return a context manager for a wait of the program for the node."""
        return _Waiting(self)


class _Waiting:
    # not a generator: issuing_line() would return a line of contextlib
    def __init__(self, watch: NodeTrace) -> None:
        self._watch = watch
        self._begun, self._origin = time.monotonic_ns(), issuing_line()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        thread = threading.current_thread()
        told = threading.get_native_id(), thread.name, self._origin, self._begun, time.monotonic_ns()
        self._watch.waits.append(told)


@refuses_copies(
    "a Trace",
    "an open file",
    "Create another one after its with block",
)
class Trace:
    """A trace, written when its ``with`` block ends; made by :meth:`Master.trace`.

    Args:
        path: path of the file.
        spaces, lock, session: the spaces of the nodes, the master's lock, the name of the session.
        ask: ``ask(index, fn)`` calls a function on a node immediately, outside the order of the log.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        spaces: Sequence[Space],
        lock: threading.RLock,
        session: str,
        ask: Callable[[int, Callable[[], int]], int],
    ) -> None:
        self._path = Path(path)
        self._spaces = [each for each in spaces if each.lost is None]
        self._lock = lock
        self._session = session
        self._ask = ask
        self._watches: dict[NodeConnection, NodeTrace] = {}

    def __enter__(self) -> Trace:
        if not _running.acquire(blocking=False):
            raise UsageError("trace: another trace is running: leave its with block first")
        try:
            if self._path.exists() and not self._path.is_file():
                # The trace replaces the file, which must not be a device such as /dev/null.
                raise OSError(0, "it is a directory" if self._path.is_dir() else "it is not a regular file")
            self._draft = AtomicFile(self._path)
        except OSError as error:
            _running.release()
            raise UsageError(f"trace: {self._path} cannot be written: {error.strerror or error}") from None
        try:
            self._clocks = {each.lines[0].index: self._clock(each.lines[0].index) for each in self._spaces}
            begun = self._everywhere(begin_timing)
            self._begun = time.monotonic_ns()
            for each in begun:
                with contextlib.suppress(ShoalError):  # the next use of a lost node raises it
                    each.result()
        except BaseException:
            self._give_up()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            pending = self._everywhere(end_timing)
            ended = time.monotonic_ns()
            told: dict[int, tuple[list[Event], int]] = {}
            for each in pending:
                with contextlib.suppress(ShoalError):
                    told[each.space.lines[0].index] = each.result()
            self._watch_no_more()
            for part in json.JSONEncoder().iterencode(self._contents(told, ended)):
                self._draft.file.write(part.encode())
            self._draft.replace()
        finally:
            self._give_up()

    def _watch_no_more(self) -> None:
        with self._lock:
            for line in self._watches:
                for each in (line, *line.further):
                    each.reap()
                line.watch = None

    def _give_up(self) -> None:
        self._watch_no_more()
        self._draft.close()
        self._watches.clear()
        _running.release()

    def _everywhere(self, fn: Callable[[str], Any]) -> list[PendingFunction]:
        """Call a function on all nodes, in the order of the log; watch the batches sent after it."""
        pending = []
        with self._lock:
            for space in self._spaces:
                line = space.lines[0]
                with contextlib.suppress(ShoalError):
                    pending.append(PendingFunction(space, payload_of(fn, (self._session,), {}, (space,))))
                    line.watch = self._watches.setdefault(line, NodeTrace(line.index))
        return pending

    def _clock(self, index: int) -> tuple[int, int]:
        """Return how far a node's clock is ahead of this one, and the error of that, both in nanoseconds.

        An offset smaller than its error counts as 0: processes on one host share a clock.
        """
        found = []
        with contextlib.suppress(ShoalError):
            for _ in range(_READS):
                before = time.monotonic_ns()
                there = self._ask(index, now)
                after = time.monotonic_ns()
                found.append(((after - before + 1) // 2, there - (before + after) // 2))
        error, offset = min(found, default=(0, 0))
        return (0 if abs(offset) <= error else offset), error

    # -- the file --------------------------------------------------------------------------------

    def _contents(self, told: dict[int, tuple[list[Event], int]], ended: int) -> dict[str, Any]:
        events: list[dict[str, Any]] = [_name("process", 0, 0, "master")]
        threads: dict[int, str] = {}
        for watch in self._watches.values():
            events += self._of_master(watch, threads, ended)
        events += [_name("thread", 0, thread, name) for thread, name in threads.items()]
        for watch in self._watches.values():
            events.append(_name("process", 1 + watch.index, 0, f"node {watch.index}"))
            done = told.get(watch.index, ([], 0))[0]
            for stream in sorted({0, *(each[0] for each in done)}):
                name = f"stream {stream}" if stream else "default stream"
                events.append(_name("thread", 1 + watch.index, stream, name))
            events += self._of_node(watch, done)
        events.sort(key=lambda event: (event.get("ts", -1.0), -event.get("dur", 0.0)))
        clocks = {
            f"node {index}": {"offset_us": offset / 1e3, "error_us": error / 1e3}
            for index, (offset, error) in self._clocks.items()
        }
        dropped = {f"node {index}": count for index, (_, count) in told.items() if count}
        lost = [f"node {watch.index}" for watch in self._watches.values() if watch.index not in told]
        other = {"session": self._session, "clocks": clocks, "dropped": dropped, "lost": lost}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}

    def _of_master(self, watch: NodeTrace, threads: dict[int, str], ended: int) -> Iterator[dict[str, Any]]:
        for thread, name, origin, begun, done in list(watch.waits):
            if begun > ended:
                continue
            threads[thread] = name
            yield self._slice(
                f"wait for node {watch.index}", "wait", 0, thread, begun, done, line=shown(origin)
            )
        for batch in watch.batches:
            if batch.sent > ended:
                continue
            same = {
                "name": f"batch to node {watch.index}", "cat": "batch", "pid": 0, "tid": 0,
                "id": f"{watch.index}.{batch.stream}.{batch.number}",
            }  # fmt: skip
            yield {**same, "ph": "b", "ts": self._time(batch.sent), "args": {"commands": batch.size}}
            yield {**same, "ph": "e", "ts": self._time(batch.done or ended)}

    def _of_node(self, watch: NodeTrace, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        offset, _ = self._clocks[watch.index]
        batches = {(batch.stream, batch.number): batch for batch in watch.batches}
        lines: dict[tuple[int, int, int], dict[int, Any]] = {}
        words: dict[Any, str] = {}
        for stream, number, segment, position, name, begun, done in events:
            batch = batches.get((stream, number))
            origin: Any = None
            if batch is not None and segment < len(batch.issued):
                if (stream, number, segment) not in lines:
                    lines[stream, number, segment] = _origins(batch.issued[segment])
                origin = lines[stream, number, segment].get(position)
            told = {}
            if origin is not None:
                if origin not in words:
                    words[origin] = shown(origin)
                told["line"] = words[origin]
            pid = 1 + watch.index
            yield self._slice(name, _category(name), pid, stream, begun - offset, done - offset, **told)

    def _slice(
        self, name: str, category: str, pid: int, tid: int, begun: int, ended: int, **told: str
    ) -> dict[str, Any]:
        return {
            "name": name, "cat": category, "ph": "X", "pid": pid, "tid": tid, "ts": self._time(begun),
            "dur": (ended - begun) / 1e3, "args": told,
        }  # fmt: skip

    def _time(self, nanoseconds: int) -> float:
        return (nanoseconds - self._begun) / 1e3


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": f"{what}_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _category(name: str) -> str:
    if name in _COPIES:
        return "copy"
    if name in _WAITS:
        return "wait"
    if name.startswith(between.NAMESPACE):
        return "collective"
    return "operation" if "." in name or " " in name else "command"


def _origins(issued: Issued) -> dict[int, Any]:
    """Map positions among the numbers of a segment to the origins of the commands there."""
    found: dict[int, Any] = {at: origin for at, (_, origin) in issued.made.items()}
    for p, kind, position in issued.commands():
        if kind is not None:
            origin = issued[position]
            found[p] = origin[0] if isinstance(origin, list) and origin else origin
    return found
