"""One rank as a process: how it starts, takes signals and ends."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import psutil

from ..errors import LaunchError
from ..failure_report import Report
from .reports import Reports


class Rank:
    """A started rank.  It leads a session and a process group of its own, whose id is ``pid``.

    The group keeps Ctrl-C at the terminal from reaching the rank twice, and collects the rank's
    children; the session lets rank 0 read from the terminal.

    After its end the process stays unreaped (a zombie) until :meth:`reap`, so that its id, which
    is the group's too, cannot be given to a stranger.

    Attributes:
        index: its place in the list of all processes of the job.  That of a rank that meets first is its
            number, so that causes can be followed from rank to rank.
        slot, restart: its place on this machine, and how many processes were there before it.
        status: None while it runs, then the exit code, or minus the number of the signal.
        ended_at: when its end was seen, in seconds of CLOCK_MONOTONIC; infinity while it runs.
        stopping: the launcher has sent it a signal because another rank had failed.
        dismissed: the launcher ends it because nobody is left whom it could join.
        leaving: the launcher has asked it to leave, as fewer processes are wanted.
        newcomer: it joins the ranks that meet first.
        stdout, stderr: the pipes that it writes to.
    """

    def __init__(
        self,
        index: int,
        slot: int,
        restart: int,
        size: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        prepare: Callable[[], None] | None = None,
        inherits: Sequence[int] = (),
        newcomer: bool = False,
    ) -> None:
        self.index, self.slot, self.restart = index, slot, restart
        self.status: int | None = None
        self.ended_at = math.inf
        self.newcomer = newcomer
        self.stopping = self.dismissed = self.leaving = False
        self._released = False
        self._started = time.monotonic()
        try:
            self._reports = Reports(size)
        except OSError as error:
            raise LaunchError(f"rank {self.name} could not be started: {error}") from error
        try:
            self._process = subprocess.Popen(
                argv,
                bufsize=0,
                stdin=None if slot == 0 and not newcomer else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**environment, **self._reports.variables},
                start_new_session=True,
                preexec_fn=prepare,
                pass_fds=[self._reports.inherited, *inherits],
            )
        except (OSError, subprocess.SubprocessError) as error:
            self._reports.close()
            raise LaunchError(f"rank {self.name} could not be started: {argv[0]}: {error}") from error
        self._reports.started()
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdout, self.stderr = self._process.stdout, self._process.stderr

    def collect(self) -> int:
        """Note the status of a rank whose ``pidfd`` has become readable, and return it."""
        result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert result is not None
        exited = result.si_code == os.CLD_EXITED
        self.status = result.si_status if exited else -result.si_status
        self.ended_at = time.monotonic()
        return self.status

    def send(self, number: int) -> None:
        """Send a signal to the rank; none of its children gets it."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def send_group(self, number: int) -> None:
        """Send a signal to the rank and to all its children that stayed in its group."""
        if not self._released:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def release(self) -> None:
        """Let go of an ended rank but for its pipes: its zombie, its descriptor.

        What is left of its group must have been killed: the kernel does not give the number to a stranger
        while a process of the group exists, but nobody could be signalled by it safely any more.
        """
        if not self._released:
            self._process.wait()
            os.close(self.pidfd)
            self._reports.close()
            self._released = True

    def reap(self) -> None:
        """Let go of an ended rank, and of its pipes."""
        self.release()
        self.stdout.close()
        self.stderr.close()

    def read_reports(self) -> None:
        """Read the reports of failure that the rank has sent."""
        self._reports.read()

    @property
    def name(self) -> str:
        """``3``, or ``3.1`` for the first restart in slot 3."""
        return f"{self.slot}.{self.restart}" if self.restart else str(self.slot)

    @property
    def is_member(self) -> bool:
        """Whether it is one of the ranks that meet first, or has joined them."""
        return not self.newcomer or self._reports.joined

    @property
    def is_released(self) -> bool:
        """Whether nothing is left of it but what is known of its end."""
        return self._released

    @property
    def reports(self) -> Sequence[Report]:
        """The reports that were read, the earliest first."""
        return self._reports.received

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.ended_at - self._started

    @property
    def stopped(self) -> bool:
        """Whether the launcher ended it: another rank had failed, or fewer were wanted."""
        return (self.stopping or self.leaving) and self.status in (-signal.SIGTERM, -signal.SIGKILL)


def members(groups: Sequence[int]) -> list[psutil.Process]:
    """The living processes in the given process groups."""
    wanted = set(groups)
    found = []
    for pid in psutil.pids():
        # Processes come and go while the list is read.
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(pid) in wanted:
                process = psutil.Process(pid)
                if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    found.append(process)
    return found
