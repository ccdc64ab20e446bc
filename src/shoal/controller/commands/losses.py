"""The error of a lost node, with the last operations of the node known to the master."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from ...common.formatting import counted
from ...errors import ShoalError
from .batch import SegmentBatch
from .history import History, Issued
from .issuing import shown


def anew(error: ShoalError) -> ShoalError:
    """Return a copy of a stored error to raise: the stored one would keep all callers' frames and tensors."""
    return copy.copy(error)


def lost_by(line: Any, error: ShoalError) -> ShoalError:
    """Mark the node as lost after a failed call; return the error to raise."""
    with line.lock:
        line.main.lose(error)
        return anew(line.main.lost or error)


def unfinished(batches: Iterable[SegmentBatch], history: History, stream: int) -> str:
    """Describe the first operation that a stream had not acknowledged, else the default stream's last one.

    Thread-safe.
    """
    waiting = [each for batch in list(batches) if not _is_done(batch) for each in batch.origins]
    where = f"stream {stream} of it" if stream else "it"
    for number, issued in enumerate(waiting):
        for operator, origin, later in _operations(issued):
            later += sum(map(len, waiting[number + 1 :]))
            told = f"{where} had not acknowledged {operator}, issued at {_shown(origin)}"
            return f"{told}; {counted(later, 'operation')} came after it" if later else told
    if stream:
        return ""
    with suppress(RuntimeError):  # another thread adds to it
        for issued in history.newest_first():
            for operator, origin, _ in reversed(list(_operations(issued))):
                done = "it had done all operations sent to it"
                return f"{done}; the last was {operator}, issued at {_shown(origin)}"
    return ""


def _is_done(batch: SegmentBatch) -> bool:
    return batch.future.done() and batch.future.exception() is None


def _operations(issued: Issued) -> Iterator[tuple[str, Any, int]]:
    """Yield each operation of a segment: operator, origin, number of operations after it."""
    for p, kind, position in issued.commands():
        if kind is not None:
            yield kind.operator, issued[position], len(issued) - position - 1
        elif p in issued.made:
            yield *issued.made[p], len(issued) - position


def _shown(origin: Any) -> str:
    return shown(origin[0] if isinstance(origin, list) and origin else origin)
