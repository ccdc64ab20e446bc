"""The base class of the processes of a job, on this machine and on other hosts."""

from __future__ import annotations

import math
import selectors
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ...common.formatting import format_ranges
from ...failure_report import Report
from .reports import MeetingTable
from .source import OutputSource


class JobProcess(ABC):
    """A process of a job: a child of this process (``process.py``), or on another host (``RemoteRank``).

    Attributes:
        index: its index in the list of all processes of the job; for an initial rank, its rank.
        slot, restart: its slot, and the number of earlier processes in the slot.
        host: its host, as named on the command line; "" if the job runs on this machine only.
        pid: its process id, and that of its group, on its host.
        status: None while it runs, then the exit code, or minus the number of the signal.
        ended_at: time at which its end was seen, in seconds of CLOCK_MONOTONIC; infinity while it runs.
        lost: why its host was lost, "" otherwise; its status is then :data:`LOST`.
        stopping: the launcher has sent it a signal because another rank had failed.
        dismissed: the launcher ends it because no ranks are left to join.
        leaving: the launcher has asked it to leave because of ``shoal scale``.
        evicted: the other ranks have reported its eviction, and it has not exited by itself.
        meetings: resolves the ranks that reports name.
        newcomer: it joins the initial ranks later.
        joined: it has reported that it joined the others.
        rebuilds: how often it has reported that it goes on in a group without failed ranks.
        sent_reports: the reports of failures that were read, the earliest first, as sent by the rank.
        stdout, stderr: sources of its output.
        is_released: only its attributes are left, see :meth:`release`.
    """

    stdout: OutputSource
    stderr: OutputSource
    meetings = MeetingTable()

    def __init__(self, index: int, slot: int, restart: int, *, newcomer: bool, host: str = "") -> None:
        self.index, self.slot, self.restart = index, slot, restart
        self.newcomer, self.host = newcomer, host
        self.pid = 0
        self.status: int | None = None
        self.ended_at = math.inf
        self.lost = ""
        self.stopping = self.dismissed = self.leaving = self.evicted = False
        self.joined = False
        self.rebuilds = 0
        self.sent_reports: Sequence[Report] = ()
        self.is_released = False

    # -- abstract methods ----------------------------------------------------------------------

    @abstractmethod
    def watch(
        self, selector: selectors.BaseSelector, ended: Callable[[], None], reported: Callable[[], None]
    ) -> None:
        """Call ``ended`` once the rank has a status, and ``reported`` after reports have come."""

    @abstractmethod
    def send(self, number: int) -> None:
        """Send a signal to the rank, but not to its children; :data:`STACKS` only if the rank handles it."""

    @abstractmethod
    def send_group(self, number: int) -> None:
        """Send a signal to the process group of the rank."""

    @abstractmethod
    def release(self) -> None:
        """Reap an ended rank, and release everything except its pipes.

        Its group must have been killed before: afterwards it is not safe to send signals to it, as the kernel
        may reuse the id once no process of the group is left.
        """

    @abstractmethod
    def reap(self) -> None:
        """Release an ended rank and its pipes."""

    @abstractmethod
    def read_reports(self) -> None:
        """Read the reports of failure that the rank has sent."""

    @abstractmethod
    def take_notices(self) -> Sequence[Report]:
        """The reports of meetings, evictions and summaries that were read since the last call."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Run time in seconds."""

    # -- common methods ------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """``3``, or ``3.1`` for the first restart in slot 3."""
        return f"{self.slot}.{self.restart}" if self.restart else str(self.slot)

    @property
    def reports(self) -> Sequence[Report]:
        """The reports of failures, the earliest first, with indices of processes instead of ranks."""
        return [self.meetings.resolved(report) for report in self.sent_reports]

    @property
    def described(self) -> str:
        """``rank 3``, or ``rank 3 on h1``."""
        return f"rank {self.name} on {self.host}" if self.host else f"rank {self.name}"

    @property
    def is_member(self) -> bool:
        """Whether it is an initial rank, or has joined the ranks."""
        return not self.newcomer or self.joined

    @property
    def counts(self) -> bool:
        """Whether it counts for ``--min`` while it runs and after it has finished."""
        return self.is_member and not self.leaving and not self.evicted

    @property
    def stopped(self) -> bool:
        """Whether the launcher ended it, because another rank had failed or by ``shoal scale``."""
        return (self.stopping or self.leaving) and self.status in (-signal.SIGTERM, -signal.SIGKILL)


def rank_names(ranks: Sequence[JobProcess]) -> str:
    """Return ``3``, or ``0, 2-5, 3.1-3.9`` for several ranks, sorted."""
    slots = sorted(rank.slot for rank in ranks if not rank.restart)
    words = [format_ranges(slots)] if slots else []
    for slot in sorted({rank.slot for rank in ranks if rank.restart}):
        restarts = sorted(rank.restart for rank in ranks if rank.restart and rank.slot == slot)
        words.append(format_ranges(restarts, f"{slot}."))
    return ", ".join(words)


#: status of a rank on a lost host; as an exit code, EX_IOERR of sysexits.h
LOST = 74
