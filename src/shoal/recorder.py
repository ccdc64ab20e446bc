"""The flight recorder: the last operations of a group, for debugging hangs and failures.

It is always on, so recording is cheap: one small object of the core per operation, appended to a ring buffer.
The future writes the time and the failure to its ``record`` when its completion is first seen.  Reading the
record of an operation that was not waited for checks the future.  A record has a weak reference to its
future, so it keeps no tensor alive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

import msgspec
import torch

from ._core import Record
from .common.copy_refusal import refuses_copies
from .common.formatting import operation_name
from .common.text_table import text_table
from .future import Future
from .spec import OpKind


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation.

    Attributes:
        kind: e.g. ``"all_reduce"``.
        number: sequence number in the group; -1 for operations matched by key, or by peer and tag.
        key: key of an operation issued in a callback; else 0.
        dtype, count: dtype (e.g. ``"float32"``) and number of elements of this rank's input, all parts
            together, or of its output if it has no input; ``""`` and 0 if there is neither.
        root, peer, tag: numbered in the group; -1 if there is none.
        state: ``"submitted"``, ``"completed"``, ``"failed"``, or ``"released"``: the future was released
            before its outcome was seen.
        submitted, ended: ``time.monotonic_ns()`` of the submission and of the end (0 before); without a
            ``wait()`` that blocks in the core, the end is when the outcome was first seen.
        failure: type and message of the exception; ``""`` if there is none.
    """

    kind: str
    number: int
    key: int
    dtype: str
    count: int
    root: int
    peer: int
    tag: int
    state: str
    submitted: int
    ended: int
    failure: str

    @property
    def name(self) -> str:
        """Kind, and number or key, as in ``"all_reduce #7"``."""
        return operation_name(self.kind, self.number, self.key)


@refuses_copies("a FlightRecorder", "the records of a group that goes on", "Copy what entries() returns")
class FlightRecorder:
    """The last operations of one group on one rank.  Thread-safe.

    Args:
        group: name of the group.
        rank: rank of this process in the group.
        size: number of operations to keep; 0: none.
    """

    def __init__(self, group: str, rank: int, size: int = 1024) -> None:
        self._group = group
        self._rank = rank
        self.size = size
        self._ring: deque[Record] = deque(maxlen=size)
        #: appends a record; used by :meth:`add` and cpp/python/fast_path.cc
        self.append: Callable[[Record], None] = self._ring.append

    def add(
        self,
        future: Future[Any],
        kind: OpKind,
        number: int,
        key: int,
        dtype: torch.dtype | None,
        count: int,
        root: int = -1,
        peer: int = -1,
        tag: int = -1,
        *,
        submitted: int | None = None,
    ) -> None:
        """Record the submission of an operation; for the arguments see :class:`Entry`.

        Args:
            submitted: None: now.
        """
        record = Record(future, kind, number, key, dtype, count, root, peer, tag)
        if submitted is not None:
            record.submitted = submitted
        self.append(record)
        future.set_record(record)

    def entries(self) -> list[Entry]:
        """The operations, oldest first, with their current states."""
        return [_entry(record) for record in list(self._ring)]

    @property
    def last_completed(self) -> Entry | None:
        """The operation with the highest number among those known to have completed without an error."""
        completed = (entry for entry in self.entries() if entry.state == "completed" and entry.number >= 0)
        return max(completed, key=lambda entry: entry.number, default=None)

    def __repr__(self) -> str:
        entries = self.entries()
        last = f"; the last is {entries[-1].name}, {entries[-1].state}" if entries else ""
        return f"<FlightRecorder of {self._title(entries)}{last}; print(recorder.dump()) shows them>"

    def dump(self) -> str:
        """The operations as a table, oldest first, with times in milliseconds."""
        entries = self.entries()
        return f"{self._title(entries)}\n{_table(entries)}"

    def to_json(self) -> str:
        """The operations as JSON: an object with ``group``, ``rank``, ``now`` and ``entries``.

        ``now`` is ``time.monotonic_ns()``, comparable with the times in the entries.
        """
        return msgspec.json.encode(
            {"group": self._group, "rank": self._rank, "now": monotonic_ns(), "entries": self.entries()}
        ).decode()

    def _title(self, entries: list[Entry]) -> str:
        pending = sum(entry.state == "submitted" for entry in entries)
        return (
            f"group {self._group!r}, rank {self._rank}: the last {len(entries)} operations, {pending} pending"
        )


def _entry(record: Record) -> Entry:
    future = record.future()
    if future is not None:
        future.done()  # updates the record if the future has completed
    if record.ended:
        state = "completed" if record.failure is None else "failed"
    elif future is None:
        state = "released"
    else:
        state = "submitted"
    dtype = record.dtype
    return Entry(
        kind=record.kind.name.lower(),
        number=record.number,
        key=record.key,
        dtype="" if dtype is None or record.kind is OpKind.BARRIER else str(dtype).removeprefix("torch."),
        count=record.count,
        root=record.root,
        peer=record.peer,
        tag=record.tag,
        state=state,
        submitted=record.submitted,
        ended=record.ended,
        failure=record.failure or "",
    )


def _table(entries: Iterable[Entry]) -> str:
    now = monotonic_ns()
    rows = [
        (
            entry.name,
            f"{entry.count} {entry.dtype}" if entry.dtype else "",
            *("" if rank < 0 else str(rank) for rank in (entry.root, entry.peer, entry.tag)),
            f"{(now - entry.submitted) / 1e6:.1f}",
            f"{(entry.ended - entry.submitted) / 1e6:.3f}" if entry.ended else "",
            f"{entry.state}: {entry.failure}" if entry.failure else entry.state,
        )
        for entry in entries
    ]
    return text_table(("operation", "count", "root", "peer", "tag", "age ms", "took ms", "state"), rows)
