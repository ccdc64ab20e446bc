"""What the ranks of this machine do now: rows for ``shoal top``, from two samples of their status pages."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from .._core import GroupStatus, RemoteRank, Statistics
from ..common.formatting import ranks_named
from ..rank_status import RankFinder, RankProcess
from ..statistics import latency_of

#: seconds without a sign of life after which a rank counts as silent.  With many ranks per core, the thread
#: that writes the status page runs every few hundred milliseconds.
SILENT_AFTER_S = 5.0
#: share of a core from which a rank without a pending operation counts as computing
_COMPUTES_FROM = 0.5
#: states in which a rank cannot do anything
HELD_UP = ("stopped", "traced", "silent")


class RankRow(msgspec.Struct, kw_only=True, omit_defaults=False):
    """What one rank does now.  Rates and shares are of the time between the two samples.

    Attributes:
        job: name of the job.
        rank, size: of the process among those it is connected to.
        pid: process id; of a rank on another host, its id there.
        remote: whether it is on another host, so that only what its heartbeats report is known.
        state: ``waits`` for another rank; ``moves`` data; ``computes``, ``sleeps``: no operation is pending;
            ``runs``: the same of a remote rank; ``stopped`` by a signal, ``traced`` by a debugger;
            ``silent``: no sign of life for 5 s; ``closed``, ``left``: it has closed its connections.
        group, call, number: of the operation that is pending for the longest time; ``""``, None if there is
            none; the number is None for messages and in callbacks.
        age_s: seconds since that was submitted; None if nothing is pending.
        waits_for: the rank for which it waits; None: for none, or unknown.
        pending, completed, failed: numbers of operations.
        bytes: of completed operations, for each the longer of input and output.
        operations_per_s, bytes_per_s: rates.
        waiting: share of time in which it waited for other ranks, from 0 to 1.
        awaited: share of time for which other ranks waited for it, on average; from 0 to 1.
        p50_s, p99_s: time from submission to completion of operations between the samples, or of all if there
            were none; None if there are none, or it is remote.
        cpu: used share of a core; may exceed 1.  None of a remote rank.
        memory: resident bytes; None of a remote rank.
        shared_memory: used bytes of shared memory.
    """

    job: str
    rank: int
    size: int
    pid: int
    remote: bool
    state: str
    group: str
    call: str
    number: int | None
    age_s: float | None
    waits_for: int | None
    pending: int | None
    completed: int
    failed: int | None
    bytes: int
    operations_per_s: float
    bytes_per_s: float
    waiting: float
    awaited: float
    p50_s: float | None
    p99_s: float | None
    cpu: float | None
    memory: int | None
    shared_memory: int


#: job and its beginning on this machine, rank, process
_Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class _Reading:
    """One rank at one time; ``waited`` has a wait that has not ended yet, so that it grows evenly."""

    completed: int
    bytes: int
    waited: float
    cpu_s: float
    late: Mapping[int, float]
    latencies: Sequence[int]


class Sampler:
    """Reads the ranks of this machine again and again.

    Args:
        job: read only the ranks of jobs whose name begins with this.
    """

    def __init__(self, job: str = "") -> None:
        self._job = job
        self._finder = RankFinder()
        self._before: dict[_Key, _Reading] = {}
        self._read_at = 0.0

    def rows(self) -> list[RankRow]:
        """Return what the ranks have done since the last call; at the first one, since they started.

        The rows are ordered by job and rank.
        """
        now = time.monotonic()
        processes = [each for each in self._finder.find() if each.status.job.startswith(self._job)]
        readings: dict[_Key, _Reading] = {}
        rows: dict[tuple[str, int, int], RankRow] = {}
        for each in processes:
            key = (each.status.job, each.status.rank, each.status.started)
            readings[key] = reading = _reading_of(each, now)
            before, seconds = self._since(key, each.status.started, now)
            rows[each.status.job, each.status.rank, each.pid] = _row(each, reading, before, seconds, now)
        for job, size, remote in _remote_ranks(processes, {(row.job, row.rank) for row in rows.values()}):
            key = (job, remote.rank, remote.pid)
            readings[key] = reading = _remote_reading(remote, now)
            before, seconds = self._since(key, None, now)
            rows[job, remote.rank, remote.pid] = _remote_row(job, size, remote, reading, before, seconds, now)
        self._count_awaited(rows.values(), readings, now)
        self._before, self._read_at = readings, now
        return [row for _, row in sorted(rows.items())]

    def _since(self, key: _Key, started: int | None, now: float) -> tuple[_Reading, float]:
        """The reading to compare with, and the seconds since then."""
        if (before := self._before.get(key)) is not None:
            return before, max(now - self._read_at, 1e-6)
        begun = self._read_at if started is None else started / 1e9
        return _NOTHING, max(now - begun, 1e-6)

    def _count_awaited(self, rows: Iterable[RankRow], readings: Mapping[_Key, _Reading], now: float) -> None:
        """Set how long each rank was waited for, from what the others have noted."""
        shares: dict[str, list[dict[int, float]]] = defaultdict(list)
        for key, reading in readings.items():
            if not reading.latencies:
                continue  # remote ranks do not report for whom they have waited
            before, seconds = self._since(key, key[2], now)
            spent = {rank: late - before.late.get(rank, 0.0) for rank, late in reading.late.items()}
            shares[key[0]].append({rank: _share(each, seconds) for rank, each in spent.items()})
        for row in rows:
            others = len(shares[row.job]) - (not row.remote)
            if others > 0:
                row.awaited = min(sum(each.get(row.rank, 0.0) for each in shares[row.job]) / others, 1.0)


_NOTHING = _Reading(0, 0, 0.0, 0.0, {}, ())


def _share(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0)


def _oldest(groups: Iterable[GroupStatus]) -> GroupStatus | None:
    """The group with the operation that is pending for the longest time."""
    pending = (group for group in groups if group.call is not None)
    return min(pending, key=lambda group: group.call.since if group.call else 0, default=None)


def _reading_of(process: RankProcess, now: float) -> _Reading:
    status = process.status
    counters: list[Statistics] = [status.ended, *(group.statistics for group in status.groups)]
    late: dict[int, float] = defaultdict(float)
    waited = sum(each.waited for each in counters) / 1e9
    for group in status.groups:
        for member in group.statistics.late:
            late[member.rank] += member.waited / 1e9
        if group.call is not None and group.call.blocker >= 0:
            late[group.call.blocker] += now - group.call.since / 1e9
            waited += now - group.call.since / 1e9
    latencies = [sum(column) for column in zip(*(each.latencies for each in counters), strict=True)]
    completed, moved = sum(each.completed for each in counters), sum(each.bytes for each in counters)
    return _Reading(completed, moved, waited, process.cpu_s, late, latencies)


def _row(process: RankProcess, reading: _Reading, before: _Reading, seconds: float, now: float) -> RankRow:
    status = process.status
    cpu = max(reading.cpu_s - before.cpu_s, 0.0) / seconds
    group = _oldest(status.groups)
    call = group.call if group is not None else None
    latencies = [
        a - b for a, b in zip(reading.latencies, before.latencies, strict=False)
    ] or reading.latencies
    if not any(latencies):
        latencies = list(reading.latencies)
    return RankRow(
        job=status.job,
        rank=status.rank,
        size=status.size,
        pid=process.pid,
        remote=False,
        state=_state(process, call is not None, call is not None and call.blocker >= 0, cpu, now),
        group=group.name if group is not None else "",
        call=call.text if call is not None else "",
        number=call.number if call is not None and call.number >= 0 else None,
        age_s=max(now - call.since / 1e9, 0.0) if call is not None else None,
        waits_for=call.blocker if call is not None and call.blocker >= 0 else None,
        pending=sum(each.pending for each in status.groups),
        completed=reading.completed,
        failed=status.ended.failed + sum(each.statistics.failed for each in status.groups),
        bytes=reading.bytes,
        operations_per_s=max(reading.completed - before.completed, 0) / seconds,
        bytes_per_s=max(reading.bytes - before.bytes, 0) / seconds,
        waiting=_share(reading.waited - before.waited, seconds),
        awaited=0.0,
        p50_s=latency_of(latencies, 0.5),
        p99_s=latency_of(latencies, 0.99),
        cpu=cpu,
        memory=process.memory,
        shared_memory=status.memory,
    )


def _state(process: RankProcess, pending: bool, waits: bool, cpu: float, now: float) -> str:
    if process.state == "T":
        return "stopped"
    if process.state == "t":
        return "traced"
    if process.status.closed:
        return "closed"
    if now - process.status.written / 1e9 > SILENT_AFTER_S:
        return "silent"
    if pending:
        return "waits" if waits else "moves"
    return "computes" if cpu >= _COMPUTES_FROM else "sleeps"


# -- ranks on other hosts ------------------------------------------------------------------------


def _remote_ranks(
    processes: Iterable[RankProcess], local: set[tuple[str, int]]
) -> Iterable[tuple[str, int, RemoteRank]]:
    """The latest report of each rank of these jobs that is not on this host: job, size of the job, report."""
    latest: dict[tuple[str, int], tuple[int, RemoteRank]] = {}
    for each in processes:
        for report in each.status.remote:
            key = (each.status.job, report.rank)
            if key in local:
                continue
            known = latest.get(key)
            if known is None or known[1].received < report.received:
                latest[key] = (each.status.size, report)
    for (job, _), (size, report) in latest.items():
        yield job, size, report


def _remote_reading(report: RemoteRank, now: float) -> _Reading:
    waited = report.waited / 1e9
    if report.age >= 0 and report.blocker >= 0:
        waited += report.age / 1e9 + now - report.received / 1e9
    return _Reading(report.completed, report.bytes, waited, 0.0, {}, ())


def _remote_row(
    job: str, size: int, report: RemoteRank, reading: _Reading, before: _Reading, seconds: float, now: float
) -> RankRow:
    silent_s = now - report.received / 1e9
    pending, waits = report.age >= 0, report.age >= 0 and report.blocker >= 0
    state = "waits" if waits else "moves" if pending else "runs"
    if not report.alive:
        state = "left"
    elif silent_s > SILENT_AFTER_S:
        state = "silent"
    first = before is _NOTHING
    return RankRow(
        job=job,
        rank=report.rank,
        size=size,
        pid=report.pid,
        remote=True,
        state=state,
        group="",
        call=report.kind if pending else "",
        number=report.number if pending and report.number >= 0 else None,
        age_s=report.age / 1e9 + silent_s if pending else None,
        waits_for=report.blocker if waits else None,
        pending=None,
        completed=report.completed,
        failed=None,
        bytes=report.bytes,
        operations_per_s=0.0 if first else max(reading.completed - before.completed, 0) / seconds,
        bytes_per_s=0.0 if first else max(reading.bytes - before.bytes, 0) / seconds,
        waiting=0.0 if first else _share(reading.waited - before.waited, seconds),
        awaited=0.0,
        p50_s=None,
        p99_s=None,
        cpu=None,
        memory=None,
        shared_memory=report.memory,
    )


# -- conclusions ---------------------------------------------------------------------------------


class Culprit(msgspec.Struct):
    """A rank for which others wait, directly or because they wait for ranks that wait for it.

    Attributes:
        rank: its number.
        row: what it does; None: it has no page, because its process has ended or belongs to another user.
        waiting: the rows of those that wait, the one that waits for the longest time first.
    """

    rank: int
    row: RankRow | None
    waiting: list[RankRow]

    def __str__(self) -> str:
        who = ranks_named(sorted(row.rank for row in self.waiting))
        verb = "waits" if len(self.waiting) == 1 else "wait"
        since = max(row.age_s or 0.0 for row in self.waiting)
        return f"{who} {verb} for rank {self.rank}, for up to {since:.1f} s; it {_doing(self.row)}"


def culprits(rows: Sequence[RankRow], least_s: float = 0.0) -> list[Culprit]:
    """Find the ranks for which others of one job wait for at least this many seconds, most waiting first."""
    by_rank = {row.rank: row for row in rows}
    # What a stopped rank waits for is not what keeps the others from going on.
    waits_for = {row.rank: None if row.state in HELD_UP else row.waits_for for row in rows}
    found: dict[int, list[RankRow]] = defaultdict(list)
    for row in rows:
        rank = waits_for[row.rank]
        if rank is None or (row.age_s or 0.0) < least_s:
            continue
        seen = {row.rank}
        while rank not in seen and (further := waits_for.get(rank)) is not None:
            seen.add(rank)
            rank = further
        found[rank].append(row)
    result = [
        Culprit(rank, by_rank.get(rank), sorted(waiting, key=lambda row: -(row.age_s or 0.0)))
        for rank, waiting in found.items()
    ]
    return sorted(result, key=lambda each: (-len(each.waiting), each.rank))


def _doing(row: RankRow | None) -> str:
    """What a rank does for which others wait, and what follows from it."""
    if row is None:
        return "is on no host that this one sees, or has ended"
    doing = {
        "stopped": "is stopped by a signal: continue it with kill -CONT",
        "traced": "is in a debugger",
        "silent": "has not run for more than 5 s: its machine is overloaded, or stopped",
        "closed": "has closed its connections",
        "left": "has left or is lost",
        "computes": "computes, outside of shoal",
        "runs": "runs outside of shoal",
        "sleeps": "neither computes nor communicates: it waits for something else, such as input",
        "moves": f"moves the data of {row.call}",
        "waits": f"waits in {row.call}: the ranks wait for one another",
    }
    return (
        f"{doing[row.state]} (process {row.pid})"
        if not row.remote
        else f"{doing[row.state]}, on another host"
    )
