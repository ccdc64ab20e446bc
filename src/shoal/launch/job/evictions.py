"""Ends evicted processes.

The other ranks evict a rank that hangs, because it does not vote in their agreement, and report that to the
launcher.  Its process would delay the end of the job and occupy its slot.  If it was only late it raises
``Evicted`` and exits by itself.  Otherwise it writes its stacks (if it uses shoal), gets SIGTERM, and finally
SIGKILL.
"""

from __future__ import annotations

import enum
import math
import signal
import time
from collections.abc import Callable, Sequence

from ...failure_report import STACKS, Report
from ..ranks.rank import JobProcess
from ..ranks.reports import MeetingTable

#: seconds for an evicted process to exit by itself
EXIT_TIMEOUT_S = 2.0
#: seconds for writing the stacks
STACKS_S = 0.3
#: maximum time from SIGTERM to SIGKILL: an evicted process has nothing to save
KILL_DELAY_S = 5.0
#: a rank that left its group at most this many seconds before the report of its eviction was not evicted
_RECENT_LEAVE_S = 2.0


class _Stage(enum.Enum):
    WAITS = enum.auto()
    WRITES_STACKS = enum.auto()
    TERMINATES = enum.auto()


class Evictions:
    """The evicted processes that still run.

    Args:
        grace: seconds from SIGTERM to SIGKILL, at most :data:`KILL_DELAY_S`.
        announce: called with a process before its first signal.
        summarise: called with a process and its report of a summary.
    """

    def __init__(
        self,
        grace: float,
        announce: Callable[[JobProcess], None],
        summarise: Callable[[JobProcess, Report], None],
    ) -> None:
        self._grace = min(grace, KILL_DELAY_S)
        self._announce = announce
        self._summarise = summarise
        self._stages: dict[JobProcess, tuple[_Stage, float]] = {}
        self.meetings = MeetingTable()

    def take_notices(self, rank: JobProcess, ranks: Sequence[JobProcess]) -> None:
        """Handle reports of meetings, evictions and summaries from ``rank``; ``ranks``: all processes."""
        for notice in rank.take_notices():
            if notice.kind == "met":
                self.meetings.add(notice, rank.index)
            elif notice.kind == "summary":
                self._summarise(rank, self.meetings.resolved(notice))
            elif not (rank.evicted or rank in self._stages):
                # If two parts evict each other, the first report counts.
                for index in self.meetings.resolved(notice).ranks:
                    if index != rank.index:
                        self.add(ranks[index], time.monotonic())

    def add(self, rank: JobProcess, now: float) -> None:
        """Add ``rank``, which the others have evicted."""
        if rank.status is None and rank not in self._stages and not (rank.evicted or _has_left(rank, now)):
            self._stages[rank] = _Stage.WAITS, now + EXIT_TIMEOUT_S

    def next_at(self) -> float:
        """The time of the next :meth:`tick`; infinity: there is none."""
        return min((at for _, at in self._stages.values()), default=math.inf)

    def tick(self, now: float) -> None:
        for rank, (stage, at) in list(self._stages.items()):
            if rank.status is not None:
                del self._stages[rank]
            elif now >= at:
                self._advance(rank, stage, now)

    def _advance(self, rank: JobProcess, stage: _Stage, now: float) -> None:
        if stage is _Stage.WAITS:
            rank.evicted = True  # not before: it may have died already, and its exit not have been seen
            self._announce(rank)
            rank.send(STACKS)
            self._stages[rank] = _Stage.WRITES_STACKS, now + STACKS_S
        elif stage is _Stage.WRITES_STACKS:
            rank.send(signal.SIGTERM)
            self._stages[rank] = _Stage.TERMINATES, now + self._grace
        else:
            rank.send_group(signal.SIGKILL)
            del self._stages[rank]


def _has_left(rank: JobProcess, now: float) -> bool:
    """Whether ``rank`` has just left its group: some of the others may not have known that."""
    return any(report.kind == "left" and report.at >= now - _RECENT_LEAVE_S for report in rank.reports)
