"""Tells the user of ranks that exited with 0 and left no group, while others run.

The launcher cannot know whether the others wait for them: torch's init_process_group tells nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ranks.rank import JobProcess
from . import summary


class UnannouncedEnds:
    """When the user is told, which is once.

    Args:
        delay: seconds after the first exit with 0.
    """

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._at: float | None = None
        self._is_told = False

    def ended_well(self, now: float) -> None:
        """A rank has exited with 0."""
        if self._at is None and not self._is_told:
            self._at = now + self._delay

    def next_at(self) -> float | None:
        """When :meth:`text` is due."""
        return self._at

    def text(self, ranks: Sequence[JobProcess]) -> bytes | None:
        """The line for the user, if there are such ranks."""
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
