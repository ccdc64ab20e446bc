"""A batch: the segments that are sent to a node at once."""

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

#: seconds between looks at whether memory is sent
_PAUSE = 0.0002


def length(payload: Any) -> int:
    """Bytes of a payload of a segment: a tensor, or a pickle; nothing of None."""
    return len(payload) if isinstance(payload, bytes) else int(getattr(payload, "nbytes", 0))


class SegmentBatch:
    """Segments that were sent, until the node has said what became of them.

    Attributes:
        number: of the batch on its line.
        future: the reply.
        origins: of each segment, where the program issued its interned calls.
        origin: where the program waits for its values.
        size: how many commands.
        bytes: of the master's tensors that it takes along.
        values: what was fetched or asked, once it was replied.
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
        """Wait until the memory of its payloads may be changed: where it is lent, that is at once."""
        while not self.future.done() and reads_arguments(self.future):
            time.sleep(_PAUSE)

    def error(self, node: int, failure: OperationFailure) -> RemoteOpError:
        """The error that the program gets for a failure of one of its commands."""
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
