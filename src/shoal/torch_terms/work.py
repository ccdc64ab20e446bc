"""The part of torch's ``Work`` that ``shoal.distributed`` and ``shoal.compat`` share."""

from __future__ import annotations

from typing import Any

from ..common.copy_refusal import refuses_copies
from ..errors import UsageError
from ..future import Future
from ..group import Message
from .arguments import Duration, limit


@refuses_copies("a Work", "an operation in progress", "Wait for it and copy the tensors")
class WorkMethods:
    """Base class of both ``Work`` classes: waits for an operation and reports its state."""

    __slots__ = ()

    _future: Future[Any]

    def wait(self, timeout: Duration | None = None) -> bool:
        """Block until the operation completes.

        For tensors on devices, the current streams wait; the host waits only if ``timeout`` is given.

        Args:
            timeout: None, zero or a negative value (as in torch): only the operation's own timeout applies.

        Returns:
            True.

        Raises:
            WaitTimeout: ``timeout`` expired.  The operation continues, and can be waited for again.
            GroupError: the operation failed.
        """
        seconds = None if timeout is None else limit(timeout)
        if seconds is None:
            self._future.wait(blocking=False)
        else:
            self._future.wait(seconds)
        return True

    def synchronize(self) -> None:
        """Call :meth:`wait` without a timeout."""
        self._future.wait(blocking=False)

    def is_completed(self) -> bool:
        """Return whether the operation has completed or failed.  Never blocks."""
        return self._future.done()

    def is_success(self) -> bool:
        """Return whether the operation has completed without an error."""
        return self._future.done() and self._future.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation; None if it is running or succeeded."""
        return self._future.exception() if self._future.done() else None


def source_of(message: object) -> int:
    """Return the group rank of the sender of a received message.

    Args:
        message: the value of the operation's future.

    Raises:
        UsageError: the operation is not a receive.
    """
    if not isinstance(message, Message):
        raise UsageError("source_rank: only a receive has a source; this work is another operation")
    return message.source
