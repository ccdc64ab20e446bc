"""The failures of one node, as the replies of its batches tell them, until the program sees them."""

from __future__ import annotations

from collections import deque

from ...errors import RemoteOpError
from ..protocol.commands import OperationFailure
from ..protocol.naming import node_name
from .batch import SegmentBatch

#: failures whose texts are kept
KEPT = 1000


class Failures:
    """The failures of a node, by their numbers; the caller holds the master's lock where it changes them.

    Args:
        node: its index.
    """

    def __init__(self, node: int) -> None:
        self._node = node
        self._errors: dict[int, RemoteOpError] = {}
        #: of failures of which another node knows why: that node, and the number there
        self._elsewhere: dict[int, tuple[int, int]] = {}
        self._unseen: deque[int] = deque(maxlen=KEPT)
        self._alone: deque[int] = deque(maxlen=KEPT)

    def add(self, failure: OperationFailure, batch: SegmentBatch) -> None:
        """A batch has told of a failure, perhaps once more."""
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
        """The error of a failure, which stays unseen; None: it is not known."""
        return self._errors.get(number)

    def elsewhere(self, number: int) -> tuple[int, int] | None:
        """The node where it is known why, and the failure's number there; None: here."""
        return self._elsewhere.get(number)

    def unseen(self) -> list[int]:
        """The failures that were not raised yet, the oldest first."""
        return list(self._unseen)

    def first_alone(self) -> int | None:
        """The oldest failure that was not raised yet and has poisoned no tensor."""
        return self._alone[0] if self._alone else None

    def see_all(self) -> None:
        """None of them need be raised any more."""
        self._unseen.clear()
        self._alone.clear()

    def raised(self, number: int, more: int = 0) -> RemoteOpError:
        """The error of a failure, to be raised: it is seen from now on.

        Args:
            more: how many others it stands for.
        """
        for noted in (self._unseen, self._alone):
            if number in noted:
                noted.remove(number)
        known = self._errors.get(number)
        if known is None:
            return RemoteOpError(
                f"node {self._node}: an operation failed so long ago that its text is gone",
                node_name(self._node),
            )
        text = f"{known} ({more} more failed after it)" if more else str(known)
        return RemoteOpError(text, known.worker, known.traceback, known.line)
