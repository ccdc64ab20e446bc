"""Starts the processes of a job: the ranks that meet first, spares, and those that join them later."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ..output.stdin import StdinPipe, StdinReader, in_background
from ..ranks.environment import OF_RANKS, Job
from ..ranks.guardian import Guardian
from ..ranks.process import LocalRank, Sweep
from ..ranks.rank import JobProcess

#: called with the name of a host, why it is lost, and the ranks that are lost with it
HostLost = Callable[[str, str, Sequence[JobProcess]], None]


class Sweeping(Protocol):
    """The end of the processes that ranks left behind; see :class:`Sweep`."""

    killed: list[str]

    def is_done(self) -> bool: ...


class Crew(Protocol):
    """Starts the processes of a job.

    A *slot* is a place on a host: a number from 0, and cores.  The process that starts in it first has
    its number for a rank.  One that is started there later has no rank before it has joined the others.

    Attributes:
        size, spares, most: how many ranks meet first, wait as spares, and may be wanted.
        slots: how many slots there are.
    """

    @property
    def size(self) -> int: ...
    @property
    def spares(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def slots(self) -> int: ...

    def watch(self, selector: selectors.BaseSelector, say: Callable[[bytes], None], lost: HostLost) -> None:
        """Handle what comes from the hosts in the loop of ``selector``."""

    def first(self, slot: int) -> JobProcess:
        """Start a rank that meets the others at once, while there are no threads; raises LaunchError."""

    def later(self, index: int, slot: int, restart: int) -> JobProcess:
        """Start a process that joins the ranks, after ``restart`` others in its slot; raises LaunchError."""

    def settle(self) -> None:
        """Return when all that were started are there; raises LaunchError."""

    def can_start(self, slot: int) -> bool:
        """Whether a process can be started in ``slot``, if none runs there."""

    def release(self, rank: JobProcess) -> None:
        """Kill what an ended rank left running in its group, and let the kernel use its number again."""

    def sweep(self, ranks: Sequence[JobProcess], linger: float) -> Sweeping:
        """All ``ranks`` have ended: what is left in their groups may live for ``linger`` seconds."""

    def next_at(self) -> float | None:
        """When :meth:`tick` has something to do."""

    def tick(self, now: float) -> None:
        """Do what is due."""

    def suspend(self) -> None:
        """This process is about to be stopped, and its ranks are."""

    def resume(self) -> None:
        """This process has been continued."""

    def close(self) -> None:
        """End all processes that are left."""


class LocalCrew:
    """Starts one program on the slots of a job, all on this machine.

    Args:
        argv: what each process executes.
        job: whose processes they are.
        environment: of all of them, beside the variables that ``job`` gives to each.
        store: URL of the job's store.
        master_port: where rank 0 may listen.
        guardian: told of every process before its program runs.
        most: so many ranks may be wanted; there is a slot for each of them, and for each spare.
        bound: the cores of the first slots, which later ones share; None: all run on all.
        threaded: whether this process may have threads when the ranks that meet first are started.
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
        most: int,
        bound: Sequence[Sequence[int]] | None = None,
        threaded: bool = False,
    ) -> None:
        self.size, self.spares, self.most = job.size, job.spares, most
        self.slots = most + job.spares
        self._argv, self._job, self._environment = argv, job, environment
        self._meeting = store, master_port
        self._guardian = guardian
        self._announce = guardian.announcer()
        self._bound, self._threaded = bound, threaded
        self._selector: selectors.BaseSelector | None = None
        #: of rank 0, if this process passes it on
        self._stdin: StdinReader | None = None
        self._pipe: StdinPipe | None = None

    def watch(self, selector: selectors.BaseSelector, say: Callable[[bytes], None], lost: HostLost) -> None:
        """Nothing comes from other hosts."""
        self._selector = selector

    def first(self, slot: int) -> JobProcess:
        cores = self._cores(slot)

        def prepare() -> None:
            self._announce()
            if cores is not None:
                os.sched_setaffinity(0, cores)

        environment = {**self._environment, **self._job.variables(slot, *self._meeting)}
        relayed = slot == 0 and in_background()
        stdin = subprocess.PIPE if relayed else None if slot == 0 else subprocess.DEVNULL
        if self._threaded:
            argv, inherits = self._guardian.wrapped(self._argv, cores), [self._guardian.pipe]
            rank = LocalRank(slot, slot, 0, self.size, argv, environment, stdin=stdin, inherits=inherits)
        else:
            rank = LocalRank(slot, slot, 0, self.size, self._argv, environment, stdin=stdin, prepare=prepare)
        if relayed:
            self._relay_stdin(rank)
        return rank

    def _relay_stdin(self, rank: LocalRank) -> None:
        """Pass the terminal's input on to ``rank`` while this job is in the foreground."""
        assert self._selector is not None
        stdin = StdinReader(lambda data: pipe.take(data))
        pipe = StdinPipe(self._selector, stdin.taken)
        pipe.attach(rank.take_stdin())
        self._stdin, self._pipe = stdin, pipe

    def later(self, index: int, slot: int, restart: int) -> JobProcess:
        environment = {k: v for k, v in self._environment.items() if k not in OF_RANKS}
        environment |= self._job.newcomer(slot, *self._meeting, local=(slot, self.slots))
        argv = self._guardian.wrapped(self._argv, self._cores(slot))
        inherits = [self._guardian.pipe]
        return LocalRank(index, slot, restart, self.size, argv, environment, inherits=inherits, newcomer=True)

    def settle(self) -> None:
        """They are there as soon as they were started."""
        if self._stdin is not None and self._selector is not None:
            self._stdin.watch(self._selector)

    def can_start(self, slot: int) -> bool:
        return True

    def release(self, rank: JobProcess) -> None:
        rank.send_group(signal.SIGKILL)
        self._guardian.forget(rank.pid)
        rank.release()

    def sweep(self, ranks: Sequence[JobProcess], linger: float) -> Sweeping:
        return Sweep(ranks, linger)

    def next_at(self) -> float | None:
        return None if self._stdin is None else self._stdin.next_at()

    def tick(self, now: float) -> None:
        if self._stdin is not None:
            self._stdin.tick(now)

    def suspend(self) -> None:
        """There are only the ranks, which the supervisor stops."""

    def resume(self) -> None:
        """There are only the ranks, which the supervisor continues."""

    def close(self) -> None:
        """The supervisor ends the ranks."""
        if self._stdin is not None and self._pipe is not None:
            self._stdin.close()
            self._pipe.close()

    def _cores(self, slot: int) -> Sequence[int] | None:
        return None if self._bound is None else self._bound[slot % len(self._bound)]
