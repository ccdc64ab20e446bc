"""Collectors for the Prometheus client: of the ranks of this machine, of a launcher's job, and of a store.

Counters are totals, so any number of scrapers can read them at any interval.  They never decrease while a
rank runs, because Prometheus takes a decrease for a restart from 0.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ...common.formatting import printable
from ...rank_sampler import STATES, RankRow, RankTotals, Sampler
from ...statistics import histogram_of
from ...store import TCPStoreServer
from .counters import JobCounters

#: maximum length of a job's name on a status page, in bytes
_MAX_JOB_BYTES = 63
#: maximum number of groups no longer seen whose waits are kept apart: a page has no room for all groups of a
#: rank, so a group that is not seen may be seen again
_MAX_UNSEEN_GROUPS = 1000
#: labels of ranks.  Not "job", which Prometheus sets to the name of the scrape configuration.
_LABELS = ("job_name", "rank")
_RANK_COUNTERS = {
    "operations": "Completed operations.",
    "failed_operations": "Failed operations.",
    "operation_bytes": "Bytes of completed operations: for each the longer of input and output.",
    "waited_seconds": "Time that operations of this rank waited for other ranks.",
    "awaited_seconds": "Time that operations of the ranks on this machine waited for this rank, as a sum.",
    "cpu_seconds": "CPU time of the process of a rank.",
}
_RANK_GAUGES = {
    "pending_operations": "Pending operations.",
    "pending_operation_age_seconds": "Time since the submission of the oldest pending operation; 0 if none "
    "is pending.",
    "resident_memory_bytes": "Resident memory of the process of a rank.",
    "shared_memory_bytes": "Shared memory that a rank uses.",
}
#: attributes of JobCounters
_JOB_COUNTERS = {
    "started_processes": "Processes started: ranks, spares and later ones.",
    "failures": "Processes that failed, without those that the first failure ended.",
    "joins": "Processes that have joined the ranks after their start.",
    "rebuilds": "Times that a process went on without lost ranks; each one counts.",
    "evictions": "Processes that the other ranks evicted and the launcher ended.",
    "restarts": "Restarts of the whole job.",
}


class RankCollector(Collector):
    """Reads the status pages of the ranks of this machine at each scrape: of one job, or of all (None)."""

    def __init__(self, job: str | None) -> None:
        self._job = None if job is None else job.encode()[:_MAX_JOB_BYTES].decode(errors="ignore")
        self._sampler = Sampler(self._job or "")
        self._lock = threading.Lock()
        #: the values of counters at the last scrape, by metric, job, rank and start of the rank
        self._values: dict[tuple[str, str, int, int], float] = {}
        #: seconds of waiting, by job, rank that was waited for, rank that waited, its start, and group; the
        #: entries that were not seen for the longest time come first
        self._late: dict[tuple[str, int, int, int, int], float] = {}
        #: the sums of earlier entries, by job and rank that was waited for
        self._earlier: dict[tuple[str, int], float] = {}

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            yield from self._families(self._samples())

    def _samples(self) -> list[tuple[RankRow, RankTotals]]:
        """A sample of each rank; of several processes with the same rank, the one that was started last."""
        latest: dict[tuple[str, int], tuple[RankRow, RankTotals]] = {}
        for row, totals in sorted(self._sampler.samples(), key=_precedence):
            if self._job is None or row.job == self._job:
                row.job = printable(row.job)
                latest[row.job, row.rank] = row, totals
        return [sample for _, sample in sorted(latest.items())]

    def _families(self, samples: Sequence[tuple[RankRow, RankTotals]]) -> Iterator[Metric]:
        counters = {
            name: CounterMetricFamily(f"shoal_{name}", text, labels=_LABELS)
            for name, text in _RANK_COUNTERS.items()
        }
        gauges = {
            name: GaugeMetricFamily(f"shoal_{name}", text, labels=_LABELS)
            for name, text in _RANK_GAUGES.items()
        }
        latency = HistogramMetricFamily(
            "shoal_operation_latency_seconds",
            "Time from submission to completion of operations.",
            labels=_LABELS,
        )
        states: dict[str, Counter[str]] = defaultdict(Counter)
        if self._job is not None:
            states[printable(self._job)] = Counter()
        values: dict[tuple[str, str, int, int], float] = {}

        def grown(name: str, row: RankRow, started: int, value: float) -> float:
            # A page that is read while a group is closed may show more than the next one.
            key = (name, row.job, row.rank, started)
            values[key] = max(value, self._values.get(key, 0.0))
            return values[key]

        awaited_s = self._awaited(samples)
        for row, totals in samples:
            states[row.job][row.state] += 1
            counts: dict[str, float] = {
                "operations": totals.completed,
                "operation_bytes": totals.bytes,
                "waited_seconds": totals.waited,
            }
            levels: dict[str, float] = {
                "pending_operation_age_seconds": row.age_s or 0.0,
                "shared_memory_bytes": row.shared_memory,
            }
            if not row.remote:
                counts |= {"failed_operations": row.failed or 0, "cpu_seconds": totals.cpu_s}
                levels |= {"pending_operations": row.pending or 0, "resident_memory_bytes": row.memory or 0}
                ends = [(str(end), below) for end, below in histogram_of(totals.latencies)]
                ends.append(("+Inf", sum(totals.latencies)))
                buckets = [(end, grown(end, row, totals.started, below)) for end, below in ends]
                latency.add_metric(_labels(row), buckets, None)
            for name, value in counts.items():
                counters[name].add_metric(_labels(row), grown(name, row, totals.started, value))
            awaited = grown("awaited_seconds", row, 0, awaited_s[row.job, row.rank])
            counters["awaited_seconds"].add_metric(_labels(row), awaited)
            for name, value in levels.items():
                gauges[name].add_metric(_labels(row), value)
        self._values = values
        ranks = GaugeMetricFamily("shoal_ranks", "Ranks in this state.", labels=("job_name", "state"))
        for job, numbers in states.items():
            for state in STATES:
                ranks.add_metric((job, state), numbers[state])
        yield from (ranks, latency, *counters.values(), *gauges.values())

    def _awaited(self, samples: Sequence[tuple[RankRow, RankTotals]]) -> dict[tuple[str, int], float]:
        """The seconds for which each rank of each job was waited for, also by ranks that have ended since."""
        jobs = {row.job for row, _ in samples}
        self._late = {key: spent for key, spent in self._late.items() if key[0] in jobs}
        self._earlier = {key: spent for key, spent in self._earlier.items() if key[0] in jobs}
        seen: dict[tuple[str, int, int, int, int], float] = {}
        for row, totals in samples:
            for (group, rank), spent in totals.late.items():
                key = (row.job, rank, row.rank, totals.started, group)
                seen[key] = max(spent, self._late.pop(key, 0.0))
        for key in list(self._late)[:-_MAX_UNSEEN_GROUPS]:
            job, rank, *_ = key
            self._earlier[job, rank] = self._earlier.get((job, rank), 0.0) + self._late.pop(key)
        self._late |= seen
        awaited: dict[tuple[str, int], float] = defaultdict(float, self._earlier)
        for (job, rank, *_), spent in self._late.items():
            awaited[job, rank] += spent
        return awaited


def _precedence(sample: tuple[RankRow, RankTotals]) -> tuple[bool, int]:
    """A rank on this machine comes after one of the same name of which only reports are known."""
    row, totals = sample
    return not row.remote, totals.started


def _labels(row: RankRow) -> tuple[str, str]:
    return row.job, str(row.rank)


class JobCollector(Collector):
    """Exports what the launcher knows of its job ``job``, also of ranks on other hosts."""

    def __init__(self, job: str, counters: JobCounters) -> None:
        self._job, self._counters = job, counters

    def collect(self) -> Iterator[Metric]:
        counters = self._counters
        running = GaugeMetricFamily(
            "shoal_processes", "Running processes of the job, on all hosts.", labels=("job_name",)
        )
        running.add_metric((self._job,), counters.running)
        yield running
        for name, text in _JOB_COUNTERS.items():
            family = CounterMetricFamily(f"shoal_{name}", text, labels=("job_name",))
            family.add_metric((self._job,), getattr(counters, name))
            yield family


class StoreCollector(Collector):
    """Exports the number of connections and keys of a store."""

    def __init__(self, server: TCPStoreServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("shoal_store_connections", "Connections to the store.", self._server.clients)
        yield GaugeMetricFamily("shoal_store_keys", "Keys in the store.", self._server.keys)
