"""Batches: segments that are sent to a node in one message, and the failures that the replies report."""

from __future__ import annotations

import copy
import time
from collections import deque
from typing import Any

from ...errors import RemoteOpError, ShoalError
from ...future import Future
from ...rpc.calls.call import reads_arguments
from ..protocol.commands import OperationFailure
from ..protocol.workers import node_name
from .history import SegmentOrigins
from .interrupts import interruptible
from .origin import CallOrigin, Origin, format_origin

#: seconds between two checks whether the payloads have been read
_POLL_INTERVAL_S = 0.0002
#: number of failures whose errors are kept
MAX_STORED_ERRORS = 1000


def length(payload: object) -> int:
    """Return the bytes of a payload: a tensor, a pickle, or None (0)."""
    return len(payload) if isinstance(payload, bytes) else int(getattr(payload, "nbytes", 0))


def fresh_copy(error: ShoalError) -> ShoalError:
    """Return a copy of a stored error to raise: the stored one would keep all callers' frames and tensors."""
    return copy.copy(error)


class SegmentBatch:
    """Segments that were sent, until the node's reply was handled.

    Attributes:
        number: number of the batch on its connection.
        future: the reply.
        origins: for each segment, where the program issued its interned calls.
        origin: where the program waits for the values.
        size: number of commands.
        bytes: size of the master's tensors in its payloads.
        values: values of the reply.
    """

    __slots__ = ("bytes", "future", "number", "origin", "origins", "size", "values")

    def __init__(self, number: int, future: Future[Any], origins: list[SegmentOrigins], size: int) -> None:
        self.number = number
        self.future = future
        self.origin: Origin | None = None
        self.origins = origins
        self.size = size
        self.bytes = 0
        self.values: list[Any] = []

    @property
    def is_done(self) -> bool:
        """Whether the node has executed it."""
        return self.future.done() and self.future.exception() is None

    @interruptible
    def wait_until_read(self) -> None:
        """Wait until the payloads' memory may be changed; for memory lent to the node that is immediately."""
        while not self.future.done() and reads_arguments(self.future):
            time.sleep(_POLL_INTERVAL_S)

    def error(self, node: int, failure: OperationFailure) -> RemoteOpError:
        """Return the error to raise for the failure of a command of this batch."""
        where = format_origin(self._issued(failure))
        text = (
            f"node {node}: {failure.operator}({failure.operands}) failed: {failure.error}\n"
            f"issued at {where}\n"
            f"before it, the node did: {failure.before or 'nothing'}\n"
            f"the traceback there:\n{failure.traceback}"
        )
        return RemoteOpError(text, node_name(node), failure.traceback, where)

    def _issued(self, failure: OperationFailure) -> Origin | None:
        if failure.position < 0:
            return self.origin
        origin: CallOrigin = self.origins[failure.segment][failure.position]
        return origin[failure.step] if isinstance(origin, list) else origin


class Failures:
    """The failures of node `node` by number; changes need the master's lock.

    Attributes:
        errors: the errors of the failures that happened here.
        causes: the node and number of the failure that caused this one, if it happened on another node.
        unseen: the failures that were not raised, oldest first.
    """

    def __init__(self, node: int) -> None:
        self._node = node
        self.errors: dict[int, RemoteOpError] = {}
        self.causes: dict[int, tuple[int, int]] = {}
        self.unseen: deque[int] = deque(maxlen=MAX_STORED_ERRORS)
        self._without_results: deque[int] = deque(maxlen=MAX_STORED_ERRORS)

    def add(self, failure: OperationFailure, batch: SegmentBatch) -> None:
        """Add a failure that a batch reported; a repeated report is ignored."""
        number = failure.poison
        if number in self.errors or number in self.causes:
            return
        self.errors.pop(number - MAX_STORED_ERRORS, None)
        self.causes.pop(number - MAX_STORED_ERRORS, None)
        if failure.of is not None:
            self.causes[number] = failure.of
            return
        self.errors[number] = batch.error(self._node, failure)
        self.unseen.append(number)
        if failure.alone:
            self._without_results.append(number)

    def first_without_results(self) -> int | None:
        """Return the oldest failure that was not raised and poisoned no tensor."""
        return self._without_results[0] if self._without_results else None

    def mark_all_seen(self) -> None:
        """Mark all failures as seen."""
        self.unseen.clear()
        self._without_results.clear()

    def take(self, number: int, more: int = 0) -> RemoteOpError:
        """Mark a failure as seen and return its error, which mentions `more` other failures."""
        for noted in (self.unseen, self._without_results):
            if number in noted:
                noted.remove(number)
        known = self.errors.get(number)
        if known is None:
            return RemoteOpError(
                f"node {self._node}: an operation failed, and its error is no longer stored",
                node_name(self._node),
            )
        text = f"{known} ({more} more failed after it)" if more else str(known)
        return RemoteOpError(text, known.worker, known.traceback, known.line)
