"""Counters of the processes of a job, for ``--metrics``."""

from __future__ import annotations

from ..ranks.rank import JobProcess


class JobCounters:
    """Counters of the processes of a job, over all of its starts.  Another thread may read them.

    Attributes:
        processes: all processes, in the order in which they were started.
        failures: number of processes that failed, without those that ended because of another failure.
        evictions: number of evicted processes that the launcher has ended.
        restarts: number of restarts of the whole job.
    """

    def __init__(self) -> None:
        self.processes: list[JobProcess] = []
        self.failures = self.evictions = self.restarts = 0

    @property
    def started_processes(self) -> int:
        """Number of processes that were started."""
        return len(self.processes)

    @property
    def running(self) -> int:
        """Number of running processes."""
        return sum(process.status is None for process in self.processes)

    @property
    def joins(self) -> int:
        """Number of processes that were started later, or as spares, and have joined the ranks."""
        return sum(process.joined for process in self.processes)

    @property
    def rebuilds(self) -> int:
        """How often a process went on in a group without lost ranks; each surviving process counts."""
        return sum(process.rebuilds for process in self.processes)
