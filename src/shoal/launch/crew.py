"""Starts the processes of a job: the ranks that meet first, spares, and those that join them later."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence

from .environment import OF_RANKS, Job
from .guardian import Guardian
from .process import Rank


class Crew:
    """Starts one program on the slots of a job.

    A *slot* is a place on this machine: a number from 0, and cores.  The process that starts in it first has
    its number for a rank.  One that is started there later has no rank before it has joined the others.

    Args:
        argv: what each process executes.
        job: whose processes they are.
        environment: of all of them, beside the variables that ``job`` gives to each.
        store: URL of the job's store.
        master_port: where rank 0 may listen.
        guardian: told of every process before its program runs.
        most: so many ranks may be wanted; there is a slot for each of them, and for each spare.
        bound: the cores of the first slots, which later ones share; None: all run on all.
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
    ) -> None:
        self.size, self.spares, self.most = job.size, job.spares, most
        self.slots = most + job.spares
        self._argv, self._job, self._environment = argv, job, environment
        self._meeting = store, master_port
        self._guardian = guardian
        self._announce = guardian.announcer()
        self._bound = bound

    def first(self, slot: int) -> Rank:
        """Start a rank that meets the others at once, while there are no threads; raises LaunchError."""
        cores = self._cores(slot)

        def prepare() -> None:
            self._announce()
            if cores is not None:
                os.sched_setaffinity(0, cores)

        environment = {**self._environment, **self._job.variables(slot, *self._meeting)}
        return Rank(slot, slot, 0, self.size, self._argv, environment, prepare=prepare)

    def later(self, index: int, slot: int, restart: int) -> Rank:
        """Start a process that joins the ranks, after ``restart`` others in its slot; raises LaunchError."""
        environment = {k: v for k, v in self._environment.items() if k not in OF_RANKS}
        environment |= self._job.newcomer(slot, self.slots, *self._meeting)
        argv = self._guardian.wrapped(self._argv, self._cores(slot))
        inherits = [self._guardian.pipe]
        return Rank(index, slot, restart, self.size, argv, environment, inherits=inherits, newcomer=True)

    def release(self, rank: Rank) -> None:
        """Kill what an ended rank left running in its group, and let the kernel use its number again."""
        rank.send_group(signal.SIGKILL)
        self._guardian.forget(rank.pid)
        rank.release()

    def _cores(self, slot: int) -> Sequence[int] | None:
        return None if self._bound is None else self._bound[slot % len(self._bound)]
