"""The failures that a node reported in its replies, until the program has seen them."""

from __future__ import annotations

from collections import deque

from ...errors import RemoteOpError
from ..protocol.commands import OperationFailure
from ..protocol.naming import node_name
from .batch import SegmentBatch

#: number of failures whose errors are kept
KEPT = 1000


class Failures:
    """The failures of node `node` by number; changes need the master's lock."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._errors: dict[int, RemoteOpError] = {}
        #: for failures caused by another node's failure: that node, and the failure's number there
        self._elsewhere: dict[int, tuple[int, int]] = {}
        self._unseen: deque[int] = deque(maxlen=KEPT)
        self._alone: deque[int] = deque(maxlen=KEPT)

    def add(self, failure: OperationFailure, batch: SegmentBatch) -> None:
        """Add a failure that a batch reported; a repeated report is ignored."""
        number = failure.poison
        if number in self._errors or number in self._elsewhere:
            return
        self._errors.pop(number - KEPT, None)
        self._elsewhere.pop(number - KEPT, None)
        if failure.of is not None:
            self._elsewhere[number] = failure.of
            return
        self._errors[number] = batch.error(self._node, failure)
        self._unseen.append(number)
        if failure.alone:
            self._alone.append(number)

    def error(self, number: int) -> RemoteOpError | None:
        """Return the error of a failure without marking it as seen; None if unknown."""
        return self._errors.get(number)

    def elsewhere(self, number: int) -> tuple[int, int] | None:
        """Return the node and number of the failure that caused this one; None if it happened here."""
        return self._elsewhere.get(number)

    def unseen(self) -> list[int]:
        """Return the failures that were not raised, oldest first."""
        return list(self._unseen)

    def first_alone(self) -> int | None:
        """Return the oldest failure that was not raised and poisoned no tensor."""
        return self._alone[0] if self._alone else None

    def see_all(self) -> None:
        """Mark all failures as seen."""
        self._unseen.clear()
        self._alone.clear()

    def raised(self, number: int, more: int = 0) -> RemoteOpError:
        """Mark a failure as seen and return its error, which mentions `more` other failures."""
        for noted in (self._unseen, self._alone):
            if number in noted:
                noted.remove(number)
        known = self._errors.get(number)
        if known is None:
            return RemoteOpError(
                f"node {self._node}: an operation failed, and its error is no longer stored",
                node_name(self._node),
            )
        text = f"{known} ({more} more failed after it)" if more else str(known)
        return RemoteOpError(text, known.worker, known.traceback, known.line)
