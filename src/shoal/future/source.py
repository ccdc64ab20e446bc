"""The interface between a future and the operation of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class FutureSource(Protocol):
    """The operation that completes a future.  All methods may be called from any thread.

    Two more methods are optional:

    - ``cancel() -> bool``: cancel the operation if possible; return whether it will fail as cancelled.
    - ``events() -> tuple[DeviceEvents | None, object]``, for a source that represents another future: the
      events after which that future's value is usable, and its tensors.  Called only after completion.
    """

    def wait(self, timeout: float | None) -> bool:
        """Block without the GIL until the operation is complete; False after ``timeout`` s (or earlier)."""

    def done(self) -> bool:
        """Whether the operation is complete.  Never blocks."""

    def exception(self) -> BaseException | None:
        """The operation's error, or None.  Called only after completion."""

    def notify(self, fn: Callable[[], None]) -> None:
        """Call ``fn()`` once when the operation is complete (at once if it is), then drop ``fn``.

        ``fn`` is quick and does not raise.  The calling thread must not be one that users wait for.
        """
