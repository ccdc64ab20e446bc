"""Sends and receives that are submitted together, so that their order does not matter.

    with group.batch() as batch:
        batch.send(mine, right)
        batch.recv(theirs, left)
    batch.wait()

Nothing is sent before the block ends, or if it raises or an argument is invalid.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ..common.copy_refusal import refuses_copies
from ..errors import UsageError
from ..future import Future, wait_all
from ..spec import ANY_SOURCE, Operation
from .staging import Staging

if TYPE_CHECKING:
    from .operations import TensorOperations


@refuses_copies("a Batch", "operations of a group", "Make another Batch")
class Batch:
    """Collects point-to-point operations; made by ``ProcessGroup.batch``."""

    def __init__(self, group: TensorOperations) -> None:
        self._group = group
        self._operations: list[Operation] = []
        self._finishers: list[Callable[[Future[Any]], Future[Any]]] = []
        self._futures: list[Future[Any]] | None = None

    def send(self, x: torch.Tensor, dst: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Add a send; arguments as in ``ProcessGroup.send``."""
        self._open()
        call = self._group._call("batch.send")
        self._operations.append(self._group._send_operation(call, x, dst, tag, timeout))
        self._finishers.append(lambda future: future)

    def recv(
        self,
        x: torch.Tensor | None = None,
        src: int = ANY_SOURCE,
        tag: int = 0,
        *,
        timeout: float | None = None,
    ) -> None:
        """Add a receive; arguments as in ``ProcessGroup.recv``."""
        self._open()
        staging = Staging()
        call = self._group._call("batch.recv")
        self._operations.append(self._group._recv_operation(call, x, src, tag, timeout, staging))
        self._finishers.append(
            lambda future: self._group._received(future, x, staging, lambda message: message.tensor)
        )

    @property
    def futures(self) -> list[Future[Any]]:
        """One future per operation, in the order in which they were added; available after the block."""
        if self._futures is None:
            raise UsageError("a batch has its futures when its `with` block has ended")
        return self._futures

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait for all operations; returns their values: None for a send, the tensor for a receive."""
        return wait_all(self.futures, timeout)

    def _open(self) -> None:
        if self._futures is not None:
            raise UsageError("this batch was submitted already; begin a new one with group.batch()")

    def __enter__(self) -> Batch:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._futures = []
            return
        submitted = self._group._submitter.submit_messages(self._operations)
        self._futures = [finish(future) for finish, future in zip(self._finishers, submitted, strict=True)]
