"""What the launcher knows of a process of its job, wherever that runs."""

from __future__ import annotations

import math
import selectors
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ...failure_report import Report
from .meetings import Meetings
from .source import OutputSource


class JobProcess(ABC):
    """A process of a job: one of this process's own (``process.py``), or another host's (``remote.py``).

    Attributes:
        index: its place in the list of all processes of the job.  That of a rank that meets first is its
            number, so that causes can be followed from rank to rank.
        slot, restart: its place, and how many processes were there before it.
        host: where it runs, as the command line names it; "" on this machine alone.
        pid: its process id there, which is its group's too.
        status: None while it runs, then the exit code, or minus the number of the signal.
        ended_at: when its end was seen, in seconds of CLOCK_MONOTONIC; infinity while it runs.
        lost: why nothing is known of it any more, "" while something is; its status is then
            :data:`LOST`.
        stopping: the launcher has sent it a signal because another rank had failed.
        dismissed: the launcher ends it because nobody is left whom it could join.
        leaving: the launcher has asked it to leave, as fewer processes are wanted.
        evicted: the other ranks have reported that they go on without it, and it has not ended by itself.
        meetings: resolve the ranks that reports name.
        newcomer: it joins the ranks that meet first.
        stdout, stderr: what it writes.
    """

    stdout: OutputSource
    stderr: OutputSource
    meetings = Meetings()

    def __init__(self, index: int, slot: int, restart: int, *, newcomer: bool, host: str = "") -> None:
        self.index, self.slot, self.restart = index, slot, restart
        self.newcomer, self.host = newcomer, host
        self.pid = 0
        self.status: int | None = None
        self.ended_at = math.inf
        self.lost = ""
        self.stopping = self.dismissed = self.leaving = self.evicted = False
        self._released = False

    # -- what differs --------------------------------------------------------------------------

    @abstractmethod
    def watch(
        self, selector: selectors.BaseSelector, ended: Callable[[], None], reported: Callable[[], None]
    ) -> None:
        """Call functions in the loop of ``selector``.

        Args:
            ended: called once the rank has a status.
            reported: called after reports have come.
        """

    @abstractmethod
    def send(self, number: int) -> None:
        """Send a signal to the rank; none of its children gets it.

        :data:`STACKS` is sent only if the rank handles it.
        """

    @abstractmethod
    def send_group(self, number: int) -> None:
        """Send a signal to the rank and to all its children that stayed in its group."""

    @abstractmethod
    def release(self) -> None:
        """Let go of an ended rank but for its pipes.

        What is left of its group must have been killed: the kernel does not give the number to a stranger
        while a process of the group exists, but nobody could be signalled by it safely any more.
        """

    @abstractmethod
    def reap(self) -> None:
        """Let go of an ended rank, and of its pipes."""

    @abstractmethod
    def read_reports(self) -> None:
        """Read the reports of failure that the rank has sent."""

    @abstractmethod
    def take_notices(self) -> Sequence[Report]:
        """The reports of meetings and evictions that were read since the last call."""

    @property
    @abstractmethod
    def sent_reports(self) -> Sequence[Report]:
        """The reports of failures that were read, the earliest first, as the rank has sent them."""

    @property
    @abstractmethod
    def joined(self) -> bool:
        """Whether it has reported that it joined the others."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """How long it ran."""

    # -- what does not -------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """``3``, or ``3.1`` for the first restart in slot 3."""
        return f"{self.slot}.{self.restart}" if self.restart else str(self.slot)

    @property
    def reports(self) -> Sequence[Report]:
        """The reports of failures, the earliest first; the ranks that they name are indices."""
        return [self.meetings.resolved(report) for report in self.sent_reports]

    @property
    def described(self) -> str:
        """``rank 3``, or ``rank 3 on h1``."""
        return f"rank {self.name} on {self.host}" if self.host else f"rank {self.name}"

    @property
    def is_member(self) -> bool:
        """Whether it is one of the ranks that meet first, or has joined them."""
        return not self.newcomer or self.joined

    @property
    def counts(self) -> bool:
        """Whether it counts for ``--min``, while it runs or after it has finished."""
        return self.is_member and not self.leaving and not self.evicted

    @property
    def is_released(self) -> bool:
        """Whether nothing is left of it but what is known of its end."""
        return self._released

    @property
    def stopped(self) -> bool:
        """Whether the launcher ended it: another rank had failed, or fewer were wanted."""
        return (self.stopping or self.leaving) and self.status in (-signal.SIGTERM, -signal.SIGKILL)


#: the status of a rank whose host is lost; as an exit code, EX_IOERR of sysexits.h
LOST = 74
