"""``Master.trace``: a timeline of master and nodes, in a file for Perfetto and Chrome."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from ...common import chrome_trace
from ...common.atomic_file import AtomicFile
from ...common.chrome_trace import Timeline
from ...common.copy_refusal import refuses_copies
from ...common.formatting import encodable
from ...errors import ShoalError, UsageError
from ..commands.connection import NodeConnection
from ..commands.history import SegmentOrigins
from ..commands.node_trace import NodeTrace
from ..commands.origin import Origin, first_origin, format_origin
from ..commands.space import Space
from ..node import node_operators
from ..node.history import Event
from ..node.sessions import begin_timing, end_timing, now
from .functions import PendingFunction, pickle_call

#: number of calls to read a node's clock; the fastest one is used
CLOCK_SAMPLES = 8
#: held while a trace is running
_running = threading.Lock()
#: commands that wait for another stream of the node, or for another node
_WAITS = ("wait", "expect")
_COPIES = (f"{node_operators.NAMESPACE}.send", f"{node_operators.NAMESPACE}.receive")


@refuses_copies("a Trace", "an open file", "Create another one after its with block")
class Trace:
    """A trace, written when its ``with`` block ends; made by :meth:`Master.trace`.

    Args:
        path: path of the file.
        spaces, lock, session: the spaces of the nodes, the master's lock, the name of the session.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        spaces: Sequence[Space],
        lock: threading.RLock,
        session: str,
    ) -> None:
        self._path = Path(path)
        self._spaces = [each for each in spaces if each.lost is None]
        self._lock = lock
        self._session = session
        self._traces: dict[NodeConnection, NodeTrace] = {}

    def __enter__(self) -> Trace:
        if not _running.acquire(blocking=False):
            raise UsageError("trace: another trace is running: leave its with block first")
        try:
            self._draft = AtomicFile(self._path)
        except OSError as error:
            _running.release()
            raise UsageError(f"trace: {self._path} cannot be written: {error.strerror or error}") from None
        try:
            nodes = [each.connections[0].node for each in self._spaces]
            self._clocks = {node.index: self._clock(node) for node in nodes}
            begun = self._call_all(begin_timing)
            self._timeline = Timeline(time.monotonic_ns())
            for each in begun:
                with contextlib.suppress(ShoalError):  # the next use of a lost node raises it
                    each.result()
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            pending = self._call_all(end_timing)
            ended = time.monotonic_ns()
            replies: dict[int, tuple[list[Event], int]] = {}
            for each in pending:
                with contextlib.suppress(ShoalError):
                    replies[each.space.connections[0].index] = each.result()
            self._stop_watching()
            chrome_trace.write_trace(self._draft.file, *self._contents(replies, ended))
            self._draft.replace()
        finally:
            self._discard()

    def _stop_watching(self) -> None:
        with self._lock:
            for node in self._traces:
                node.reap()
                node.trace = None

    def _discard(self) -> None:
        self._stop_watching()
        self._draft.close()
        self._traces.clear()
        _running.release()

    def _call_all(self, fn: Callable[[str], Any]) -> list[PendingFunction]:
        """Call a function on all nodes, in the order of the log; watch the batches sent after it."""
        pending = []
        with self._lock:
            for space in self._spaces:
                node = space.connections[0].node
                with contextlib.suppress(ShoalError):
                    pending.append(PendingFunction(space, pickle_call(fn, (self._session,), {}, (space,))))
                    node.trace = self._traces.setdefault(node, NodeTrace(node.index))
        return pending

    def _clock(self, node: NodeConnection) -> tuple[int, int]:
        """Return how far a node's clock is ahead of this one, and the error of that, both in nanoseconds.

        An offset smaller than its error counts as 0: processes on one host share a clock.
        """
        found = []
        with contextlib.suppress(ShoalError):
            for _ in range(CLOCK_SAMPLES):
                before = time.monotonic_ns()
                there = node.ask(now)
                after = time.monotonic_ns()
                found.append(((after - before + 1) // 2, there - (before + after) // 2))
        error, offset = min(found, default=(0, 0))
        return (0 if abs(offset) <= error else offset), error

    # -- the file --------------------------------------------------------------------------------

    def _contents(
        self, replies: dict[int, tuple[list[Event], int]], ended: int
    ) -> tuple[list[chrome_trace.Event], dict[str, Any]]:
        """Return the events, and further data."""
        events = [chrome_trace.process_name(0, "master")]
        threads: dict[int, str] = {}
        for trace in self._traces.values():
            events += self._of_master(trace, threads, ended)
        events += [chrome_trace.thread_name(0, thread, name) for thread, name in threads.items()]
        for trace in self._traces.values():
            events.append(chrome_trace.process_name(1 + trace.index, f"node {trace.index}"))
            done = replies.get(trace.index, ([], 0))[0]
            for stream in sorted({0, *(each[0] for each in done)}):
                name = f"stream {stream}" if stream else "default stream"
                events.append(chrome_trace.thread_name(1 + trace.index, stream, name))
            events += self._of_node(trace, done)
        clocks = {
            f"node {index}": {"offset_us": offset / 1e3, "error_us": error / 1e3}
            for index, (offset, error) in self._clocks.items()
        }
        dropped = {f"node {index}": count for index, (_, count) in replies.items() if count}
        lost = [f"node {trace.index}" for trace in self._traces.values() if trace.index not in replies]
        other = {"session": self._session, "clocks": clocks, "dropped": dropped, "lost": lost}
        return chrome_trace.in_order(events), other

    def _of_master(
        self, trace: NodeTrace, threads: dict[int, str], ended: int
    ) -> Iterator[chrome_trace.Event]:
        for thread, name, origin, begun, done in list(trace.waits):
            if begun > ended:
                continue
            threads[thread] = name
            line = encodable(format_origin(origin))
            yield self._timeline.slice(
                f"wait for node {trace.index}", "wait", 0, thread, begun, done, {"line": line}
            )
        for batch in trace.batches:
            if batch.sent > ended:
                continue
            yield from self._timeline.interval(
                f"batch to node {trace.index}", "batch", 0, 0,
                f"{trace.index}.{batch.stream}.{batch.number}", batch.sent, batch.done or ended,
                {"commands": batch.size},
            )  # fmt: skip

    def _of_node(self, trace: NodeTrace, events: Sequence[Event]) -> Iterator[chrome_trace.Event]:
        offset, _ = self._clocks[trace.index]
        batches = {(batch.stream, batch.number): batch for batch in trace.batches}
        lines: dict[tuple[int, int, int], dict[int, Origin | None]] = {}
        line_of = cache(lambda origin: encodable(format_origin(origin)))
        for stream, number, segment, position, name, begun, done in events:
            batch = batches.get((stream, number))
            origin: Origin | None = None
            if batch is not None and segment < len(batch.issued):
                if (stream, number, segment) not in lines:
                    lines[stream, number, segment] = _origins(batch.issued[segment])
                origin = lines[stream, number, segment].get(position)
            args = {}
            if origin is not None:
                args["line"] = line_of(origin)
            pid = 1 + trace.index
            yield self._timeline.slice(
                name, _category(name), pid, stream, begun - offset, done - offset, args
            )


def _category(name: str) -> str:
    if name in _COPIES:
        return "copy"
    if name in _WAITS:
        return "wait"
    if name.startswith(node_operators.NAMESPACE):
        return "collective"
    return "operation" if "." in name or " " in name else "command"


def _origins(issued: SegmentOrigins) -> dict[int, Origin | None]:
    """Map positions among the numbers of a segment to the origins of the commands there."""
    found = {at: origin for at, (_, origin) in issued.made.items()}
    for p, kind, position in issued.commands():
        if kind is not None:
            found[p] = first_origin(issued[position])
    return found
