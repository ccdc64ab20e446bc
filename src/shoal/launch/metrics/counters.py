"""Counters of the processes of a job, for ``--metrics``."""

from __future__ import annotations

from ..ranks.rank import JobProcess


class JobCounters:
    """Counters of the processes of a job, over all of its starts; ``collectors.py`` describes them.

    Another thread may read them.
    """

    def __init__(self) -> None:
        #: in the order in which they were started
        self.processes: list[JobProcess] = []
        self.failures = self.evictions = self.restarts = 0

    @property
    def started_processes(self) -> int:
        return len(self.processes)

    @property
    def running(self) -> int:
        return sum(process.status is None for process in self.processes)

    @property
    def joins(self) -> int:
        return sum(process.joined for process in self.processes)

    @property
    def rebuilds(self) -> int:
        return sum(process.rebuilds for process in self.processes)
