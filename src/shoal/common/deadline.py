"""One deadline for everything that a call does."""

from __future__ import annotations

import math
import time

from ..errors import UsageError

#: 23 days, about the longest that ``poll`` can wait
_FOREVER = 2e6


class Deadline:
    """A moment on the monotonic clock, ``timeout`` seconds after its making.

    Args:
        timeout: seconds from now, 0 for "only what is there already".

    Raises:
        UsageError: ``timeout`` is negative or not a number.
    """

    __slots__ = ("at", "timeout")

    def __init__(self, timeout: float) -> None:
        if not isinstance(timeout, (int, float)) or timeout < 0 or math.isnan(timeout):
            raise UsageError(f"timeout={timeout!r}: expected a number of seconds from 0")
        self.timeout = min(timeout, _FOREVER)
        self.at = time.monotonic() + self.timeout

    def remaining(self) -> float:
        """Seconds that are left, never below 0."""
        return max(0.0, self.at - time.monotonic())

    def milliseconds(self) -> int:
        """The time that is left, for ``poll``: rounded up, so that it never ends early and spins."""
        return math.ceil(self.remaining() * 1000)

    @property
    def expired(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self.at
