"""Starts the processes of a job: the initial ranks, spares, and processes that join later."""

from __future__ import annotations

import math
import selectors
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ..output.stdin import StdinPipe, StdinReader, is_in_background
from ..ranks.environment import INITIAL_RANK_VARIABLES, Job
from ..ranks.fork_server import ForkServer
from ..ranks.guardian import Guardian
from ..ranks.process import GroupCleanup, LocalRank
from ..ranks.rank import JobProcess

#: called with the name of a lost host, the reason, and its ranks
HostLost = Callable[[str, str, Sequence[JobProcess]], None]


class Cleanup(Protocol):
    """Cleanup of the processes that ranks left behind; see :class:`GroupCleanup`."""

    killed: list[str]

    def is_done(self) -> bool: ...


class RankLauncher(ABC):
    """Starts the processes of a job, on this machine or on other hosts.

    A *slot* is a number from 0, with cores on a host.  The first process in a slot has its number as rank.  A
    later process has no rank until it has joined the others.

    Attributes:
        size, spares, max_ranks, slots: numbers of initial ranks, spares, ranks at most, and slots.
    """

    def __init__(self, job: Job, max_ranks: int, slots: int) -> None:
        self.size, self.spares, self.max_ranks, self.slots = job.size, job.spares, max_ranks, slots
        self._job = job
        self._selector: selectors.BaseSelector | None = None

    def watch(self, selector: selectors.BaseSelector, say: Callable[[bytes], None], lost: HostLost) -> None:
        """Handle events of the hosts in the loop of ``selector``."""
        self._selector = selector

    @abstractmethod
    def start(self, index: int, slot: int, restart: int, *, newcomer: bool) -> JobProcess:
        """Start a process, restart ``restart`` of its slot; raises LaunchError.

        Initial ranks are started before this process has threads; a ``newcomer`` joins them.
        """

    @abstractmethod
    def wait_started(self) -> None:
        """Wait until all processes have been started, then read stdin; raises LaunchError."""

    def can_start(self, slot: int) -> bool:
        """Whether a process can be started in ``slot`` if it is free."""
        return True

    @abstractmethod
    def release(self, rank: JobProcess) -> None:
        """Kill the process group of an ended rank, and let the kernel reuse its process id."""

    @abstractmethod
    def sweep(self, ranks: Sequence[JobProcess], linger: float) -> Cleanup:
        """Kill the process groups of the ended ``ranks`` after ``linger`` seconds."""

    @abstractmethod
    def next_at(self) -> float:
        """The time of the next :meth:`tick`; infinity: there is none."""

    @abstractmethod
    def tick(self, now: float) -> None:
        """Run timed actions that are due."""

    def suspend(self) -> None:
        """Prepare for the stop of this process; its ranks are stopped already."""

    def resume(self) -> None:
        """Go on after this process was continued."""

    @abstractmethod
    def close(self) -> None:
        """Release stdin and agents; the supervisor has ended the ranks."""


class LocalRankLauncher(RankLauncher):
    """Starts one program on the slots of a job, all on this machine.

    Args:
        environment: of all processes, in addition to the variables that ``job`` sets for each.
        store, master_port: see :meth:`Job.variables`.
        guardian: every process announces itself to it before its program runs.
        max_ranks: maximum number of ranks; each of them, and each spare, has a slot.
        bound: the cores of the first slots, which later slots share; None: all run on all cores.
        threaded: whether this process may have threads when the initial ranks are started.
        fork_server: forks the processes; None: each executes ``argv``.
    """

    def __init__(
        self,
        argv: Sequence[str],
        job: Job,
        environment: Mapping[str, str],
        *,
        store: str,
        master_port: str,
        guardian: Guardian,
        max_ranks: int,
        bound: Sequence[Sequence[int]] | None = None,
        threaded: bool = False,
        fork_server: ForkServer | None = None,
    ) -> None:
        super().__init__(job, max_ranks, max_ranks + job.spares)
        self._argv, self._environment = argv, environment
        self._meeting = store, master_port
        self._guardian = guardian
        self._bound, self._threaded = bound, threaded
        self._fork_server = fork_server
        #: stdin for rank 0, if this process passes it on
        self._stdin: StdinReader | None = None
        self._pipe: StdinPipe | None = None

    def start(self, index: int, slot: int, restart: int, *, newcomer: bool) -> JobProcess:
        hidden = INITIAL_RANK_VARIABLES if newcomer else ()
        environment = {k: v for k, v in self._environment.items() if k not in hidden}
        local = slot, self.slots if newcomer else self.size
        environment |= self._job.variables(slot, *self._meeting, local=local, newcomer=newcomer)
        is_first = slot == 0 and not newcomer
        relayed = is_first and is_in_background()
        rank = LocalRank(
            index, slot, restart, self.size, self._argv, environment,
            guardian=self._guardian,
            cores=None if self._bound is None else self._bound[slot % len(self._bound)],
            fork_server=self._fork_server,
            stdin=subprocess.PIPE if relayed else None if is_first else subprocess.DEVNULL,
            threaded=newcomer or self._threaded,
            newcomer=newcomer,
        )  # fmt: skip
        if relayed:
            self._relay_stdin(rank)
        return rank

    def _relay_stdin(self, rank: LocalRank) -> None:
        """Pass the input of the terminal to ``rank`` while this job is in the foreground."""
        assert self._selector is not None
        stdin = StdinReader(lambda data: pipe.take(data))
        pipe = StdinPipe(self._selector, stdin.taken)
        pipe.attach(rank.take_stdin())
        self._stdin, self._pipe = stdin, pipe

    def wait_started(self) -> None:
        if self._stdin is not None and self._selector is not None:
            self._stdin.watch(self._selector)

    def release(self, rank: JobProcess) -> None:
        rank.send_group(signal.SIGKILL)
        self._guardian.forget(rank.pid)
        rank.release()

    def sweep(self, ranks: Sequence[JobProcess], linger: float) -> Cleanup:
        return GroupCleanup(ranks, linger)

    def next_at(self) -> float:
        return math.inf if self._stdin is None else self._stdin.retry_at

    def tick(self, now: float) -> None:
        if self._stdin is not None:
            self._stdin.tick(now)

    def close(self) -> None:
        if self._stdin is not None and self._pipe is not None:
            self._stdin.close()
            self._pipe.close()
