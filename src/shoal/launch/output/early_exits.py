"""The message on ranks that exited with 0 without leaving a group, while others run.

The launcher cannot know whether the others wait for them, for example in torch's init_process_group.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ranks.rank import JobProcess
from . import summary


class EarlyExitWarning:
    """Decides when to print the message: once, ``delay`` seconds after the first exit with 0."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._at: float | None = None
        self._is_told = False

    def ended_well(self, now: float) -> None:
        """Record that a rank has exited with 0."""
        if self._at is None and not self._is_told:
            self._at = now + self._delay

    def next_at(self) -> float | None:
        """The time to call :meth:`text`, if any."""
        return self._at

    def text(self, ranks: Sequence[JobProcess]) -> bytes | None:
        """The message, if there are such ranks."""
        self._at = None
        ended = [
            rank
            for rank in ranks
            if rank.status == 0 and rank.is_member and not (rank.reports or rank.leaving)
        ]
        running = [rank for rank in ranks if rank.status is None]
        if not (ended and running):
            return None
        self._is_told = True
        return summary.unannounced(ended, running)
