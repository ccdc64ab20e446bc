"""Events of the Chrome trace format, which Perfetto and ``chrome://tracing`` open.

A trace is an object with a list of events.  Times are microseconds; those of shoal are nanoseconds of
CLOCK_MONOTONIC, which a :class:`Timeline` converts.

Source: "Trace Event Format", Chromium project.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import msgspec

from .formatting import encodable

#: one event
Event = dict[str, Any]

#: number of events that are encoded at a time
_CHUNK_EVENTS = 1000


class _Writable(Protocol):
    def write(self, data: bytes, /) -> object: ...


class Timeline:
    """Makes events whose times are relative to ``zero``, in nanoseconds."""

    def __init__(self, zero: int) -> None:
        self._zero = zero

    def time(self, nanoseconds: int) -> float:
        """A time of an event."""
        return (nanoseconds - self._zero) / 1e3

    def slice(
        self, name: str, category: str, pid: int, tid: int, begun: int, ended: int, args: Mapping[str, object]
    ) -> Event:
        """An interval on the track of a thread; those of one track are nested or do not overlap."""
        return {
            "name": name, "cat": category, "ph": "X", "pid": pid, "tid": tid, "ts": self.time(begun),
            "dur": (ended - begun) / 1e3, "args": args,
        }  # fmt: skip

    def interval(
        self,
        name: str,
        category: str,
        pid: int,
        tid: int,
        ident: str,
        begun: int,
        ended: int,
        args: Mapping[str, object],
    ) -> Iterator[Event]:
        """The two events of an interval that may overlap others; ``ident`` is unique in its process."""
        same = {"name": name, "cat": category, "pid": pid, "tid": tid, "id": ident}
        yield {**same, "ph": "b", "ts": self.time(begun), "args": args}
        yield {**same, "ph": "e", "ts": self.time(ended)}

    def instant(
        self, name: str, category: str, pid: int, tid: int, at: int, args: Mapping[str, object]
    ) -> Event:
        """A point in time on the track of a thread."""
        return {
            "name": name, "cat": category, "ph": "i", "s": "t", "pid": pid, "tid": tid, "ts": self.time(at),
            "args": args,
        }  # fmt: skip


def process_name(pid: int, name: str) -> Event:
    """The name of a process, for its tracks."""
    return {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": encodable(name)}}


def process_order(pid: int, index: int) -> Event:
    """The place of a process among the others."""
    return {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": index}}


def thread_name(pid: int, tid: int, name: str) -> Event:
    """The name of a thread, for its track."""
    return {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": encodable(name)}}


def in_order(events: Iterable[Event]) -> list[Event]:
    """Sort events by time, and an interval before those within it; names come first."""
    return sorted(events, key=lambda event: (event.get("ts", float("-inf")), -event.get("dur", 0.0)))


def write_trace(file: _Writable, events: Iterable[object], other: Mapping[str, object]) -> None:
    """Write a trace.

    Args:
        file: open for writing.
        events: dictionaries or structures of msgspec; not kept in memory.
        other: the content of ``otherData``.
    """
    encode = msgspec.json.Encoder().encode
    file.write(b'{"traceEvents":[')
    separator, left = b"", iter(events)
    while chunk := list(islice(left, _CHUNK_EVENTS)):
        file.write(separator + encode(chunk)[1:-1])
        separator = b",\n"
    file.write(b'],"displayTimeUnit":"ms","otherData":' + encode(other) + b"}")
