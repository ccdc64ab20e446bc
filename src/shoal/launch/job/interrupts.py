"""Distinguishes a second Ctrl-C from the first one."""

from __future__ import annotations

import math

#: SIGINTs within this time count as one, which reached the launcher directly and through its process group
_DUPLICATE_SIGNAL_S = 0.2
#: seconds after Ctrl-C until the launcher prints for which ranks it waits
_REMIND_S = 1.0


class CtrlCFilter:
    """The SIGINTs to the launcher; ``remind_at`` is the time to print for which ranks the launcher waits."""

    def __init__(self) -> None:
        self._first_at = -math.inf
        self.remind_at: float | None = None

    def is_first(self, now: float) -> bool:
        """Record a SIGINT; return whether it is the first one."""
        if self._first_at > -math.inf:
            return False
        self._first_at, self.remind_at = now, now + _REMIND_S
        return True

    def is_another(self, now: float) -> bool:
        """Whether a SIGINT at this time is a second one, and not a copy of the first."""
        return now - self._first_at > _DUPLICATE_SIGNAL_S
