"""A rank as a child process: its start, signals and end."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ... import config
from ...errors import LaunchError
from ...failure_report import STACKS, Report, descriptor_name
from .fork_server import ForkedRank, ForkServer
from .guardian import Guardian, preparation
from .program import flaw_of_script, reason_of
from .rank import JobProcess
from .rank_helper import RankHelper
from .reports import Reports
from .source import Pipe

#: seconds to wait for the end of a process after SIGKILL; it may be blocked in the kernel
_KILL_TIMEOUT_S = 2.0


class LocalRank(JobProcess):
    """A started rank, which leads a new session and process group with the id ``pid``.

    The group contains the rank's children, and avoids that Ctrl-C at the terminal reaches the rank twice.
    The session lets rank 0 read from the terminal.

    After its end the process stays unreaped (a zombie) until :meth:`reap`, so that the kernel cannot reuse
    the id of the process and of its group.

    Args:
        size: number of ranks of the job.
        guardian: the rank announces itself to it before its program runs.
        cores: the cores to bind it to; None: all.
        fork_server: forks the rank, and has the command already; None: execute ``argv``.
        stdin: see :class:`subprocess.Popen`.
        threaded: whether this process may have threads, so that no Python code may run between fork and exec.

    Attributes:
        pidfd: readable once the process has ended.
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
        guardian: Guardian,
        cores: Sequence[int] | None,
        fork_server: ForkServer | None,
        stdin: int | None,
        threaded: bool,
        newcomer: bool,
    ) -> None:
        super().__init__(index, slot, restart, newcomer=newcomer)
        if flaw := flaw_of_script(argv[0], environment):
            raise LaunchError(f"rank {self.name} could not be started: {argv[0]}: {flaw}")
        self._started = time.monotonic()
        self._selector: selectors.BaseSelector | None = None
        self._helper: RankHelper | None = None
        try:
            self._reports = Reports(size)
        except OSError as error:
            raise LaunchError(f"rank {self.name} could not be started: {error}") from error
        passed = {config.REPORT_FD.name: self._reports.inherited}
        given = {config.PYTHON.name: sys.executable, **environment, **_named(passed)}
        try:
            if environment.get(config.CONNECT.name) == "1":
                self._helper = RankHelper(given, passed.values())
                passed[config.HELPER_FD.name] = self._helper.inherited
                given |= _named(passed)
            self._process: subprocess.Popen[bytes] | ForkedRank
            if fork_server is not None:
                self._process = fork_server.fork(guardian, cores, given, stdin, passed)
            else:
                self._process = subprocess.Popen(
                    guardian.wrapped(argv, cores) if threaded else argv,
                    bufsize=0,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=given,
                    start_new_session=True,
                    preexec_fn=None if threaded else preparation(os.getpid(), guardian.pipe, cores),
                    pass_fds=[*passed.values(), *([guardian.pipe] if threaded else [])],
                )
        except LaunchError as error:
            self._close_unstarted()
            raise LaunchError(f"rank {self.name} could not be started: {error}") from error
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._close_unstarted()
            raise LaunchError(
                f"rank {self.name} could not be started: {argv[0]}: {reason_of(error, argv[0])}"
            ) from error
        self._reports.started()
        if self._helper is not None:
            self._helper.started()
        self.sent_reports = self._reports.received
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdout, self.stderr = Pipe(self._process.stdout), Pipe(self._process.stderr)

    def _close_unstarted(self) -> None:
        self._reports.close()
        if self._helper is not None:
            self._helper.close()

    def watch(
        self, selector: selectors.BaseSelector, ended: Callable[[], None], reported: Callable[[], None]
    ) -> None:
        def collect() -> None:
            selector.unregister(self.pidfd)
            self._collect()
            hear()
            ended()

        def hear() -> None:
            self.read_reports()
            if self._reports.ended or self.status is not None:
                self._ignore_reports()
            reported()

        selector.register(self.pidfd, selectors.EVENT_READ, collect)
        selector.register(self._reports, selectors.EVENT_READ, hear)
        self._selector = selector

    def _ignore_reports(self) -> None:
        if self._selector is not None:
            self._selector.unregister(self._reports)
            self._selector = None

    def _collect(self) -> None:
        result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert result is not None
        exited = result.si_code == os.CLD_EXITED
        self.status = result.si_status if exited else -result.si_status
        self.ended_at = time.monotonic()

    def send(self, number: int) -> None:
        if number == STACKS and not self._handles(number):
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def _handles(self, number: int) -> bool:
        with suppress(OSError, ValueError):
            status = Path(f"/proc/{self.pid}/status").read_text()
            found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
            return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)
        return False

    def send_group(self, number: int) -> None:
        if not self.is_released:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def release(self) -> None:
        if not self.is_released:
            self._process.wait()
            if self._helper is not None:
                self._helper.close()
            os.close(self.pidfd)
            self._ignore_reports()
            self._reports.close()
            self.is_released = True

    def reap(self) -> None:
        self.release()
        self.stdout.close()
        self.stderr.close()

    def read_reports(self) -> None:
        self._reports.read()
        self.joined, self.rebuilds = self._reports.joined, self._reports.rebuilds

    def take_stdin(self) -> int:
        """The write end of stdin of a rank that was started with ``stdin=PIPE``; the caller owns it."""
        assert self._process.stdin is not None
        with self._process.stdin as file:
            return os.dup(file.fileno())

    def take_notices(self) -> Sequence[Report]:
        return self._reports.take_notices()

    @property
    def seconds(self) -> float:
        return self.ended_at - self._started


def _named(descriptors: Mapping[str, int]) -> dict[str, str]:
    """The variables that name descriptors for a rank, which inherits them."""
    return {name: descriptor_name(fd) for name, fd in descriptors.items()}


def members(groups: Sequence[int]) -> list[psutil.Process]:
    wanted = set(groups)
    found = []
    for pid in psutil.pids():
        # Processes may end while the list is read.
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(pid) in wanted:
                process = psutil.Process(pid)
                if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    found.append(process)
    return found


class GroupCleanup:
    """Ends the processes that ended ranks left behind in their process groups, after ``linger`` seconds.

    Attributes:
        killed: names and process ids of the processes that were killed.
    """

    def __init__(self, ranks: Sequence[JobProcess], linger: float) -> None:
        self._ranks = [rank for rank in ranks if not rank.is_released]
        self._kill_at = time.monotonic() + linger
        self._was_killed = False
        self.killed: list[str] = []

    def is_done(self) -> bool:
        """Kill the processes when it is time; return whether all have ended, or are blocked in the kernel."""
        left = members([rank.pid for rank in self._ranks])
        now = time.monotonic()
        if not left or now >= self._kill_at + _KILL_TIMEOUT_S:
            return True
        if now >= self._kill_at and not self._was_killed:
            self._was_killed = True
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    self.killed.append(f"{process.name()} ({process.pid})")
            for rank in self._ranks:
                rank.send_group(signal.SIGKILL)
        return False
