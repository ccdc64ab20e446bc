"""Ends the processes without which the other ranks go on.

A rank that hangs does not vote in the agreement of the others, who then go on without it and report that.  It
may still run, hold the job's end up, and keep its slot from a new process.  A process that was only late
raises ``Evicted`` and ends by itself, so it gets a moment for that.  Then it writes its stacks (if it uses
shoal), gets SIGTERM, and at last SIGKILL.
"""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Callable, Sequence

from ...failure_report import STACKS
from ..ranks.meetings import Meetings
from ..ranks.rank import JobProcess

#: seconds in which an evicted process may end by itself
PATIENCE_S = 2.0
#: seconds for writing the stacks
STACKS_S = 0.3
#: longest time in seconds from SIGTERM to SIGKILL: an evicted process has nothing to save
GRACE_S = 5.0
#: a rank that left its group so many seconds before the report of its eviction was not evicted
_LEFT_S = 2.0


class _Stage(enum.Enum):
    WAITS = enum.auto()
    WRITES_STACKS = enum.auto()
    TERMINATES = enum.auto()


class Evictions:
    """The evicted processes that have not ended.

    Args:
        grace: seconds from SIGTERM to SIGKILL, if that is less than :data:`GRACE_S`.
        announce: called with a process before it gets the first signal.

    Attributes:
        meetings: resolve the ranks that reports name.
    """

    def __init__(self, grace: float, announce: Callable[[JobProcess], None]) -> None:
        self._grace = min(grace, GRACE_S)
        self._announce = announce
        self._under_way: dict[JobProcess, tuple[_Stage, float]] = {}
        self.meetings = Meetings()

    def take_notices(self, rank: JobProcess, ranks: Sequence[JobProcess]) -> None:
        """Handle the reports of meetings and evictions that ``rank`` has sent; ``ranks``: all processes."""
        for notice in rank.take_notices():
            if notice.kind == "met":
                self.meetings.add(notice, rank.index)
            elif not (rank.evicted or rank in self._under_way):
                # Else two parts go on without each other, and the first report counts.
                for index in self.meetings.resolved(notice).ranks:
                    if index != rank.index:
                        self.add(ranks[index], time.monotonic())

    def add(self, rank: JobProcess, now: float) -> None:
        """The others go on without ``rank``."""
        if rank.status is None and rank not in self._under_way and not (rank.evicted or _has_left(rank, now)):
            self._under_way[rank] = _Stage.WAITS, now + PATIENCE_S

    def next_at(self) -> float | None:
        """When :meth:`tick` has something to do."""
        return min((at for _, at in self._under_way.values()), default=None)

    def tick(self, now: float) -> None:
        """Send the signals that are due."""
        for rank, (stage, at) in list(self._under_way.items()):
            if rank.status is not None:
                del self._under_way[rank]
            elif now >= at:
                self._go_on(rank, stage, now)

    def _go_on(self, rank: JobProcess, stage: _Stage, now: float) -> None:
        if stage is _Stage.WAITS:
            rank.evicted = True  # not before: it may have died, and its end not be known yet
            self._announce(rank)
            rank.send(STACKS)
            self._under_way[rank] = _Stage.WRITES_STACKS, now + STACKS_S
        elif stage is _Stage.WRITES_STACKS:
            rank.send(signal.SIGTERM)
            self._under_way[rank] = _Stage.TERMINATES, now + self._grace
        else:
            rank.send_group(signal.SIGKILL)
            del self._under_way[rank]


def _has_left(rank: JobProcess, now: float) -> bool:
    """Whether ``rank`` left its group just now: not all of the others knew that when they decided."""
    return any(report.kind == "left" and report.at >= now - _LEFT_S for report in rank.reports)
