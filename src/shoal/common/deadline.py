"""``Deadline``: a timeout that several operations of one call share."""

from __future__ import annotations

import math
import time

from ..errors import UsageError

#: seconds (23 days); about the maximum timeout of ``poll``
_MAX_TIMEOUT_S = 2e6


class Deadline:
    """A time on the monotonic clock, ``timeout`` seconds after the construction.

    Args:
        timeout: seconds from now; 0: do not wait.

    Raises:
        UsageError: ``timeout`` is negative or not a number.
    """

    __slots__ = ("at", "timeout")

    def __init__(self, timeout: float) -> None:
        if not isinstance(timeout, (int, float)) or timeout < 0 or math.isnan(timeout):
            raise UsageError(f"timeout={timeout!r}: expected a number of seconds from 0")
        self.timeout = min(timeout, _MAX_TIMEOUT_S)
        self.at = time.monotonic() + self.timeout

    def remaining(self) -> float:
        """Return the remaining seconds, at least 0."""
        return max(0.0, self.at - time.monotonic())

    def milliseconds(self) -> int:
        """Return the remaining milliseconds for ``poll``, rounded up, so that loops do not spin."""
        return math.ceil(self.remaining() * 1000)

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.at
