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
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.autograd import profiler

from ..common.copy_refusal import refuses_copies
from ..errors import UsageError
from ..future import Future, wait_all
from ..spec import ANY_SOURCE, Operation, OpKind
from .staging import Staging

if TYPE_CHECKING:
    from .operations import TensorOperations

#: The kind, tensor, peer, tag and timeout of a message.
_Arguments: TypeAlias = tuple[OpKind, Any, int, int, float]
#: The operation of a message, and the function from the operation's future to the user's.
_Checked: TypeAlias = tuple[Operation, Callable[[Future[Any]], Future[Any]]]


@refuses_copies("a Batch", "operations of a group", "Make another Batch")
class Batch:
    """Collects point-to-point operations; made by ``ProcessGroup.batch``."""

    def __init__(self, group: TensorOperations) -> None:
        self._group = group
        #: The messages, with None if the fast path takes them.
        self._messages: list[tuple[_Arguments, _Checked | None]] = []
        self._futures: list[Future[Any]] | None = None

    def send(self, x: torch.Tensor, dst: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Add a send; arguments as in ``ProcessGroup.send``."""
        self._add(OpKind.SEND, x, dst, tag, timeout)

    def recv(
        self,
        x: torch.Tensor | None = None,
        src: int = ANY_SOURCE,
        tag: int = 0,
        *,
        timeout: float | None = None,
    ) -> None:
        """Add a receive; arguments as in ``ProcessGroup.recv``."""
        self._add(OpKind.RECV, x, src, tag, timeout)

    def _add(self, kind: OpKind, x: Any, peer: int, tag: int, timeout: float | None) -> None:
        self._open()
        message = (kind, x, peer, tag, self._group._timeout if timeout is None else timeout)
        quick = not profiler._is_profiler_enabled and self._group._shortcut.accepts(*message)
        self._messages.append((message, None if quick else self._check(message)))

    def _check(self, message: _Arguments) -> _Checked:
        """Return the operation of a message, and what makes the future of its value of the operation's."""
        group, (kind, x, peer, tag, timeout) = self._group, message
        if kind is OpKind.SEND:
            call = group._call("batch.send")
            return group._send_operation(call, x, peer, tag, timeout), lambda future: future
        staging = Staging()
        operation = group._recv_operation(group._call("batch.recv"), x, peer, tag, timeout, staging)
        return operation, lambda future: group._received(future, x, staging, lambda arrived: arrived.tensor)

    def _submit(self) -> list[Future[Any]]:
        if all(checked is None for _, checked in self._messages):
            return [
                self._group._shortcut.message(*message) or self._submit_checked([self._check(message)])[0]
                for message, _ in self._messages
            ]
        return self._submit_checked([checked or self._check(message) for message, checked in self._messages])

    def _submit_checked(self, messages: list[_Checked]) -> list[Future[Any]]:
        submitted = self._group._submitter.submit_messages([operation for operation, _ in messages])
        return [finish(future) for (_, finish), future in zip(messages, submitted, strict=True)]

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
        self._futures = self._submit()
