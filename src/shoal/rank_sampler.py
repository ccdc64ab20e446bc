"""The present state and the counters of the ranks of this machine, from samples of their status pages."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ._core import GroupStatus, RankStatus, RemoteRank
from .rank_status import RankFinder, RankProcess
from .statistics import latency_of

#: seconds without a sign of life after which a rank counts as silent.  With many ranks per core, the thread
#: that writes the status page runs every few hundred milliseconds.
SILENT_AFTER_S = 5.0
#: share of a core from which a rank without a pending operation counts as computing
_COMPUTES_FROM = 0.5
#: number of ranks that others were late for on a status page, ``kStatusLate`` of ``cpp/engine/status_page.h``
_LATE_RANKS = 16
#: states in which a rank cannot do anything
HELD_UP = ("stopped", "traced", "silent")
#: maximum number of closed worlds of a process whose counters are kept apart: one that cannot be read for a
#: moment is not closed
_CLOSED_WORLDS = 64
#: all states; see :class:`RankRow`
STATES = ("waits", "moves", "computes", "sleeps", "runs", *HELD_UP, "left")


class RankRow(msgspec.Struct, kw_only=True):
    """The present state of one rank.  Rates and shares are of the time between the two samples.

    Attributes:
        job: name of the job.
        leader: process of the first rank that shares memory with this one, which tells jobs of one name
            apart; 0 if there is no other.
        rank, size: of the process among those it is connected to.
        pid: process id; of a rank on another host, its id there.
        remote: whether it is on another host, so that only what its heartbeats report is known.
        state: ``waits`` for another rank; ``moves`` data, or needs data of a rank that runs; ``computes``,
            ``sleeps``: no operation is pending; ``runs``: the same of a remote rank; ``stopped`` by a signal,
            ``traced`` by a debugger; ``silent``: no sign of life for 5 s; ``left``: a remote one is lost, or
            has left.
        group, call, number: of the oldest pending operation for which a thread waits, or else of the oldest
            one that is not a receive; ``""``, None if there is none; the number is None for messages and in
            callbacks.
        age_s: seconds since that was submitted; None if there is none.  Of a remote rank: at its last report.
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
    leader: int
    rank: int
    size: int
    pid: int
    remote: bool
    state: str
    group: str = ""
    call: str = ""
    number: int | None = None
    age_s: float | None = None
    waits_for: int | None = None
    pending: int | None = None
    completed: int
    failed: int | None = None
    bytes: int
    operations_per_s: float
    bytes_per_s: float
    waiting: float
    awaited: float = 0.0
    p50_s: float | None = None
    p99_s: float | None = None
    cpu: float | None = None
    memory: int | None = None
    shared_memory: int


#: job, leader and size as in :class:`RankRow`, process and rank
_Identity = tuple[str, int, int, int, int]
#: the process in the identity of a rank on another host
_REMOTE_PID = 0


@dataclass(frozen=True, slots=True)
class RankTotals:
    """The counters of a rank at one time.

    Attributes:
        started: time at which its first connections were created, in nanoseconds of CLOCK_MONOTONIC; if it is
            remote, at which the first known report of its process came.  When the counters of a rank begin
            again, this changes.
        as_of: time of the counters, in seconds of CLOCK_MONOTONIC: pages are written every 50 ms, and ranks
            on other hosts report every second.
        completed, failed, bytes: as in :class:`RankRow`, with those of worlds that the process has closed
            while it had another one; ``failed`` is 0 if it is remote.
        waited: seconds of waiting for other ranks, with the waits that have not ended yet.
        cpu_s: CPU time of its process, in seconds; 0 if it is remote.
        late: seconds of waiting for each rank in each open group, likewise, by group and rank, of the 16
            ranks with the longest times; empty if it is remote.
        latencies: numbers of operations by latency, see :mod:`shoal.statistics`; empty if it is remote.
    """

    started: int
    as_of: float
    completed: int
    bytes: int
    waited: float
    cpu_s: float
    late: Mapping[tuple[int, int], float]
    latencies: Sequence[int]
    failed: int = 0


#: reading of a rank before the first sample
_NOTHING = RankTotals(0, 0.0, 0, 0, 0.0, 0.0, {}, ())


class _WorldCounters(NamedTuple):
    """The counters of one world of a process.

    Attributes:
        as_of: their time, in nanoseconds of CLOCK_MONOTONIC.
        counters: completed and failed operations, bytes, nanoseconds of waiting, and latencies.
    """

    as_of: int
    counters: list[int]


class _Life:
    """The counters of a process that is a rank, from its first world until none is seen any more.

    Attributes:
        pid: the process, on its host.
        started: as in :class:`RankTotals`.
    """

    def __init__(self, pid: int, started: int) -> None:
        self.pid, self.started = pid, started
        self._worlds: dict[int, _WorldCounters] = {}
        #: the sums of earlier worlds
        self._earlier: list[int] = []
        self._before, self._sampled_at = _NOTHING, started / 1e9

    def sample(
        self,
        opened: Mapping[int, _WorldCounters],
        now: float,
        cpu_s: float,
        late: Mapping[tuple[int, int], float],
    ) -> tuple[RankTotals, RankTotals, float]:
        """Return the counters of the process, those of the last sample, and the seconds since then.

        Args:
            opened: its open worlds, with counters that may be older than known ones.
        """
        for world, read in opened.items():
            known = self._worlds.pop(world, read)  # the closed ones come first
            self._worlds[world] = max(read, known, key=lambda each: each.as_of)
        for world in list(self._worlds)[: -_CLOSED_WORLDS - len(opened)]:
            closed = self._worlds.pop(world).counters
            self._earlier = _sums([self._earlier or [0] * len(closed), closed])
        every = [each.counters for each in self._worlds.values()]
        sums = _sums([*every, self._earlier] if self._earlier else every)
        completed, failed, moved, waited, *latencies = sums
        as_of = max(each.as_of for each in self._worlds.values()) / 1e9
        reading = RankTotals(
            self.started, as_of, completed, moved, waited / 1e9, cpu_s, late, latencies, failed
        )  # fmt: skip
        before, seconds = self._before, max(now - self._sampled_at, 1e-6)
        self._before, self._sampled_at = reading, now
        return reading, before, seconds


def _sums(rows: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]


class Sampler:
    """Reads the ranks of this machine again and again.

    Args:
        job: read only the ranks of jobs whose name begins with this.
    """

    def __init__(self, job: str = "") -> None:
        self._job = job
        self._finder = RankFinder()
        self._lives: dict[_Identity, _Life] = {}

    def rows(self) -> list[RankRow]:
        """Return what the ranks have done since the last call; at the first one, since they started.

        The rows are ordered by job and rank.
        """
        return [row for row, _ in self.samples()]

    def samples(self) -> list[tuple[RankRow, RankTotals]]:
        """Return the same, and the counters since the ranks have started."""
        now = time.monotonic()
        jobs: dict[tuple[str, int, int], list[RankProcess]] = defaultdict(list)
        for each in self._finder.find():
            if each.job.startswith(self._job):
                jobs[each.job, each.leader, each.size].append(each)
        local = {_identity(each) for of_job in jobs.values() for each in of_job}
        # A rank on another host has no report for a moment if its only open world is new.
        self._lives = {
            key: life
            for key, life in self._lives.items()
            if key in local or (key[3] == _REMOTE_PID and key[:3] in jobs)
        }
        return [each for job in sorted(jobs) for each in self._samples_of(jobs[job], now)]

    def _samples_of(self, processes: Sequence[RankProcess], now: float) -> list[tuple[RankRow, RankTotals]]:
        """The samples of one job."""
        found: list[tuple[RankRow, RankTotals]] = []
        shares: list[dict[int, float]] = []
        moving: dict[int, int] = {}
        for each in processes:
            life = self._life(_identity(each), each.pid, each.started)
            worlds = {page.started: _counters(page) for page in each.pages}
            reading, before, seconds = life.sample(worlds, now, each.cpu_s, _late(each))
            group = _foremost(_groups_of(each))
            found.append((_row(each, group, reading, before, seconds, now), reading))
            if group is not None and group.call is not None and group.call.blocker >= 0:
                moving[each.rank] = group.call.blocker
            late: dict[int, float] = defaultdict(float)
            for rank, spent in late_since(before, reading):
                late[rank] += spent
            shares.append({rank: _waiting(spent, before, reading) for rank, spent in late.items()})
        first, _ = found[0]
        for rank, reports in _remote_ranks(processes).items():
            key = (first.job, first.leader, first.size, _REMOTE_PID, rank)
            # Jobs of one name may have several processes of this rank at the same time: keep to one of them.
            alive = {each.pid for each in reports if each.alive}
            latest_pid = max(reports, key=lambda each: (each.alive, each.received)).pid
            pid = known.pid if (known := self._lives.get(key)) and known.pid in alive else latest_pid
            latest = {each.world: each for each in reports if each.pid == pid}
            worlds = {world: _remote_counters(each) for world, each in latest.items()}
            life = self._life(key, pid, reports[-1].received)
            reading, before, seconds = life.sample(worlds, now, 0.0, {})
            if before is _NOTHING:  # the counters may have begun long ago, so they give no rates
                before = reading
            foremost = max(latest.values(), key=lambda each: (each.alive, bool(each.waits), each.age))
            found.append((_remote_row(first, foremost, reading, before, seconds, now), reading))
        wait_for_held_up([row for row, _ in found], moving)
        for row, _ in found:
            others = len(shares) - (not row.remote)
            if others > 0:
                row.awaited = min(sum(each.get(row.rank, 0.0) for each in shares) / others, 1.0)
        return sorted(found, key=lambda each: each[0].rank)

    def _life(self, key: _Identity, pid: int, started: int) -> _Life:
        """The known life of this process, or a new one."""
        life = self._lives.get(key)
        if life is None or life.pid != pid:
            life = self._lives[key] = _Life(pid, started)
        return life


def _waiting(waited: float, before: RankTotals, reading: RankTotals) -> float:
    """The share of ``waited`` seconds in the time in which the counters have changed."""
    observed = max(reading.as_of - (before.as_of or reading.started / 1e9), 1e-6)
    return min(max(waited / observed, 0.0), 1.0)


def late_since(before: RankTotals, reading: RankTotals) -> Iterable[tuple[int, float]]:
    """The ranks for which a rank has waited since ``before``, and the seconds, by group.

    A page has the 16 ranks of each group with the longest times. One that is new among these has waited for
    longer than since ``before``, and is left out.
    """
    known = Counter(group for group, _ in before.late)
    for (group, rank), spent in reading.late.items():
        if (then := before.late.get((group, rank))) is not None:
            yield rank, spent - then
        elif known[group] < _LATE_RANKS:
            yield rank, spent


def wait_for_held_up(rows: Sequence[RankRow], moving: Mapping[int, int]) -> None:
    """Change rows of ranks that need data (``moving``: of which rank) of one that cannot do anything."""
    held_up = {row.rank for row in rows if row.state in (*HELD_UP, "left")}
    for row in rows:
        if row.state == "moves" and (source := moving.get(row.rank)) in held_up:
            row.state, row.waits_for = "waits", source


def _foremost(groups: Iterable[GroupStatus]) -> GroupStatus | None:
    """The group whose operation has been pending for the longest time, preferably one that waits."""
    pending = (group for group in groups if group.call is not None)
    return min(
        pending, key=lambda each: (not each.call.waits, each.call.since) if each.call else (True, 0),
        default=None,
    )  # fmt: skip


def _identity(process: RankProcess) -> _Identity:
    return process.job, process.leader, process.size, process.pid, process.rank


def _counters(page: RankStatus) -> _WorldCounters:
    every = [page.ended, *(group.statistics for group in page.groups)]
    counts = [[each.completed, each.failed, each.bytes, each.waited, *each.latencies] for each in every]
    return _WorldCounters(page.written, _sums(counts))


def _late(process: RankProcess) -> dict[tuple[int, int], float]:
    """``late`` of :class:`RankTotals`."""
    late: dict[tuple[int, int], float] = defaultdict(float)
    for group in _groups_of(process):
        for member in group.statistics.late:
            late[group.ident, member.rank] += member.waited / 1e9
    return late


def _groups_of(process: RankProcess) -> list[GroupStatus]:
    return [group for page in process.pages for group in page.groups]


def _row(
    process: RankProcess,
    group: GroupStatus | None,
    reading: RankTotals,
    before: RankTotals,
    seconds: float,
    now: float,
) -> RankRow:
    """Make the row of a rank, of whose groups ``group`` has the foremost operation."""
    cpu = max(reading.cpu_s - before.cpu_s, 0.0) / seconds
    call = group.call if group is not None else None
    waits_for = call.blocker if call is not None and call.waits and call.blocker >= 0 else None
    # A page that was read while it was written may show less than the one before.
    pairs = zip(reading.latencies, before.latencies or (0,) * len(reading.latencies), strict=True)
    latencies = [max(now - then, 0) for now, then in pairs]
    if not any(latencies):
        latencies = list(reading.latencies)
    return RankRow(
        job=process.job,
        leader=process.leader,
        rank=process.rank,
        size=process.size,
        pid=process.pid,
        remote=False,
        state=_state(process, cpu, now, pending=call is not None, waits=waits_for is not None),
        group=group.name if group is not None else "",
        call=call.text if call is not None else "",
        number=call.number if call is not None and call.number >= 0 else None,
        age_s=max(now - call.since / 1e9, 0.0) if call is not None else None,
        waits_for=waits_for,
        pending=sum(each.pending for each in _groups_of(process)),
        completed=reading.completed,
        failed=reading.failed,
        bytes=reading.bytes,
        operations_per_s=max(reading.completed - before.completed, 0) / seconds,
        bytes_per_s=max(reading.bytes - before.bytes, 0) / seconds,
        waiting=_waiting(reading.waited - before.waited, before, reading),
        p50_s=latency_of(latencies, 0.5),
        p99_s=latency_of(latencies, 0.99),
        cpu=cpu,
        memory=process.memory,
        shared_memory=sum(page.memory for page in process.pages),
    )


def _state(process: RankProcess, cpu: float, now: float, *, pending: bool, waits: bool) -> str:
    if process.state == "T":
        return "stopped"
    if process.state == "t":
        return "traced"
    if now - process.written / 1e9 > SILENT_AFTER_S:
        return "silent"
    if pending:
        return "waits" if waits else "moves"
    return "computes" if cpu >= _COMPUTES_FROM else "sleeps"


# -- ranks on other hosts ------------------------------------------------------------------------


def _remote_ranks(processes: Sequence[RankProcess]) -> dict[int, list[RemoteRank]]:
    """The reports of each rank that is not on this host, one for each open page; the latest comes last."""
    local = {each.rank for each in processes}
    found: dict[int, list[RemoteRank]] = defaultdict(list)
    reports = [report for each in processes for page in each.pages for report in page.remote]
    for report in sorted(reports, key=lambda each: each.received):
        if report.rank not in local:
            found[report.rank].append(report)
    return found


def _remote_counters(report: RemoteRank) -> _WorldCounters:
    return _WorldCounters(report.received, [report.completed, 0, report.bytes, report.waited])


def _remote_row(
    local: RankRow, report: RemoteRank, reading: RankTotals, before: RankTotals, seconds: float, now: float
) -> RankRow:
    silent_s = now - report.received / 1e9
    pending = report.age >= 0
    waits = pending and report.waits and report.blocker >= 0
    state = "waits" if waits else "moves" if pending else "runs"
    if not report.alive:
        state = "left"
    elif silent_s > SILENT_AFTER_S:
        state = "silent"
    return RankRow(
        job=local.job,
        leader=local.leader,
        rank=report.rank,
        size=local.size,
        pid=report.pid,
        remote=True,
        state=state,
        call=report.kind if pending else "",
        number=report.number if pending and report.number >= 0 else None,
        age_s=report.age / 1e9 if pending else None,
        waits_for=report.blocker if waits else None,
        completed=reading.completed,
        bytes=reading.bytes,
        operations_per_s=max(reading.completed - before.completed, 0) / seconds,
        bytes_per_s=max(reading.bytes - before.bytes, 0) / seconds,
        waiting=_waiting(reading.waited - before.waited, before, reading),
        shared_memory=report.memory,
    )
