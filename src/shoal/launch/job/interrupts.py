"""Tells a second Ctrl-C from the first one."""

from __future__ import annotations

import math

#: SIGINTs nearer than this are one: it may reach the launcher directly and through its group
_SAME_S = 0.2
#: seconds in which most ranks end after Ctrl-C; then the user is told for which ranks the launcher waits
_REMIND_S = 1.0


class Interrupts:
    """The SIGINTs to the launcher; times are in seconds of one clock.

    Attributes:
        remind_at: when the user is to be told for which ranks the launcher waits; None: not at all.
    """

    def __init__(self) -> None:
        self._first_at = -math.inf
        self.remind_at: float | None = None

    def is_first(self, now: float) -> bool:
        """Take a SIGINT; whether it is the first one."""
        if self._first_at > -math.inf:
            return False
        self._first_at, self.remind_at = now, now + _REMIND_S
        return True

    def is_another(self, now: float) -> bool:
        """Whether a SIGINT at this time is none that was taken already."""
        return now - self._first_at > _SAME_S
