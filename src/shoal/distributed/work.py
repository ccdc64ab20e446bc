"""What operations return that were called with ``async_op=True``: torch's ``Work`` over a shoal future."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import UsageError
from ..future import Future
from ..group import Message
from ..group.submission import mapped
from .arguments import Duration, seconds

#: Held while a work makes its one future for callbacks.
_making = threading.Lock()


class Work:
    """One operation that may still be running; made by the functions of this package."""

    __slots__ = ("_future", "_listed", "_outputs", "_source")

    def __init__(
        self, future: Future[Any], outputs: Sequence[torch.Tensor], source: int | None = None
    ) -> None:
        """Wrap a future; users get a work from an operation instead.

        Args:
            future: of the operation.
            outputs: the tensors that it writes.
            source: for a receive that names the sender: its rank in the group.
        """
        self._future = future
        self._outputs = list(outputs)
        self._source = source
        self._listed: Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: Duration | None = None) -> bool:
        """Wait for completion; True, or an exception.

        Args:
            timeout: None or zero, as in torch: as long as the operation's own timeout lets it run.

        Raises:
            WaitTimeout: ``timeout`` ran out.  The operation goes on, and can be waited for again.
            GroupError: what went wrong with the operation.
        """
        self._future.wait(seconds(timeout) or None)
        return True

    def synchronize(self) -> None:
        """The same as :meth:`wait` without a timeout."""
        self._future.wait()

    def is_completed(self) -> bool:
        """Whether the operation is complete, well or not.  Never blocks."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether it is complete and nothing went wrong."""
        return self._future.done() and self._future.exception() is None

    def exception(self) -> BaseException | None:
        """What went wrong; None if nothing did, and while the operation is running."""
        return self._future.exception() if self._future.done() else None

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation wrote.

        Raises:
            InvalidFutureState: it is not complete.
        """
        self._future.value()
        return list(self._outputs)

    def get_future(self) -> Future[list[torch.Tensor]]:
        """The :class:`shoal.Future` of the list of tensors that the operation writes; always the same one."""
        with _making:
            if self._listed is None:
                # One for all callers: callbacks are matched across ranks by their order on it.
                self._listed = mapped(self._future, lambda _: list(self._outputs))
            return self._listed

    def source_rank(self) -> int:
        """Who sent what a receive got, as a rank of the group.

        Raises:
            UsageError: the operation is no receive.
            InvalidFutureState: it takes from any sender and is not complete.
        """
        if self._source is not None:
            return self._source
        message = self._future.value()
        if not isinstance(message, Message):
            raise UsageError("source_rank: only a receive has a source, and this work is another operation")
        return message.source

    def __repr__(self) -> str:
        return f"<Work of {self._future!r}>"


def finished(future: Future[Any], outputs: Sequence[torch.Tensor], async_op: bool) -> Work | None:
    """What a function returns: a work if it was called with ``async_op``, else None after waiting."""
    if async_op:
        return Work(future, outputs)
    future.wait()
    return None
