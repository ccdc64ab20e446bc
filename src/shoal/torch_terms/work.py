"""Torch's ``Work`` over a :class:`shoal.Future`: the methods that both faces of shoal have."""

from __future__ import annotations

from typing import Any

from ..common.copy_refusal import refuses_copies
from ..errors import UsageError
from ..future import Future
from ..group import Message
from .durations import Duration, limit


@refuses_copies(
    "a Work",
    "an operation in progress",
    "Wait for it and copy the tensors",
)
class WorkMethods:
    """The methods that wait for an operation or tell its state; the base of both classes ``Work``."""

    __slots__ = ()

    #: of the operation
    _future: Future[Any]

    def wait(self, timeout: Duration | None = None) -> bool:
        """Block until the operation is complete.

        For tensors on devices the current streams wait, and the host only if there is a ``timeout``.

        Args:
            timeout: None, or zero or less, as in torch: as long as the operation's own timeout lets it run.

        Returns:
            True.

        Raises:
            WaitTimeout: ``timeout`` ran out.  The operation goes on, and can be waited for again.
            GroupError: the operation failed.
        """
        seconds = None if timeout is None else limit(timeout)
        if seconds is None:
            self._future.wait(blocking=False)
        else:
            self._future.wait(seconds)
        return True

    def synchronize(self) -> None:
        """The same as :meth:`wait` without a timeout."""
        self._future.wait(blocking=False)

    def is_completed(self) -> bool:
        """Whether the operation is complete, well or not.  Never blocks."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether the operation is complete and nothing went wrong."""
        return self._future.done() and self._future.exception() is None

    def exception(self) -> BaseException | None:
        """The error of the operation; None if there is none, and while it is running."""
        return self._future.exception() if self._future.done() else None


def source_of(message: object) -> int:
    """The rank in the group that sent what a receive took.

    Args:
        message: the value of the operation's future.

    Raises:
        UsageError: the operation is no receive.
    """
    if not isinstance(message, Message):
        raise UsageError("source_rank: only a receive has a source, and this work is another operation")
    return message.source
