"""A source: a future asks it about the operation behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class FutureSource(Protocol):
    """An operation of an engine, as a future sees it.  All methods may be called from any thread.

    Two more methods may be there:

    - ``cancel() -> bool``: end the operation before its time if that is possible; whether it will end so.
      It completes then with an exception that says so.
    - ``events() -> tuple[DeviceEvents | None, object]``, for a source that stands for another future: the
      events behind which that one's value is usable, and the tensors in it.  Called after completion only.
    """

    def wait(self, timeout: float | None) -> bool:
        """Block, without the GIL, until the operation is complete; False when time ran out (or earlier)."""

    def done(self) -> bool:
        """Whether the operation is complete; never blocks."""

    def exception(self) -> BaseException | None:
        """The operation's error.  Called after completion only."""

    def notify(self, fn: Callable[[], None]) -> None:
        """Call ``fn()`` once when the operation is complete (at once if it is), and forget it then.

        ``fn`` is quick and does not raise; the thread that calls it must not be one that users wait on.
        """
