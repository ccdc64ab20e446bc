"""A batch: segments that are sent to a node in one message."""

from __future__ import annotations

import time
from typing import Any

from ...errors import RemoteOpError
from ...future import Future
from ...rpc.calls.call import reads_arguments
from ..protocol.commands import OperationFailure
from ..protocol.naming import node_name
from .history import Issued
from .interrupts import waiting
from .issuing import Origin, shown

#: seconds between two checks whether the payloads have been read
_PAUSE = 0.0002


def length(payload: Any) -> int:
    """Return the bytes of a payload: a tensor, a pickle, or None (0)."""
    return len(payload) if isinstance(payload, bytes) else int(getattr(payload, "nbytes", 0))


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

    def __init__(self, number: int, future: Future[Any], origins: list[Issued], size: int) -> None:
        self.number = number
        self.future = future
        self.origin: Origin | None = None
        self.origins = origins
        self.size = size
        self.bytes = 0
        self.values: list[Any] = []

    @waiting
    def wait_until_read(self) -> None:
        """Wait until the payloads' memory may be changed; for memory lent to the node that is immediately."""
        while not self.future.done() and reads_arguments(self.future):
            time.sleep(_PAUSE)

    def error(self, node: int, failure: OperationFailure) -> RemoteOpError:
        """Return the error to raise for the failure of a command of this batch."""
        where = shown(self._issued(failure))
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
        origin: Origin | list[Origin | None] | None = self.origins[failure.segment][failure.position]
        return origin[failure.step] if isinstance(origin, list) else origin
