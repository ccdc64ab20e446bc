"""Merging of the traces of all ranks into one file.

All files are read twice, one at a time: first for the clocks, the arrows and the summary, then to write their
events.  Between the two only the times of collectives are kept.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import click
import msgspec

from ...common import chrome_trace
from ...common.atomic_file import AtomicFile
from ...common.decoding import MalformedMessage
from ...common.formatting import counted, format_duration, ranks_named
from ...tracing.rank_trace import COLLECTIVE, KEYED, MESSAGE, WAIT, wait_name
from ...tracing.spool import TracedRank
from .clocks import SYNCHRONIZING, ClockBounds, ClockOffset
from .inputs import RankEvent, RankInput, TorchInput, find, number_of, read_rank, read_torch

SCHEMA = "shoal.trace.merged/1"
#: category and name of the arrows
FLOW = "last to arrive"
#: pids of the processes of each file of torch.profiler begin at a multiple of this
_TORCH_PIDS = 1_000_000
#: number of ranks in the summary
_SHOWN = 10

#: job, epoch and meeting, in which ranks are unique
_World: TypeAlias = tuple[str, int, str]


class _Member(NamedTuple):
    """A rank of a world."""

    world: _World
    rank: int


class _Collective(NamedTuple):
    """A collective, the same one on all members."""

    world: _World
    group: str
    number: int


@dataclass(slots=True)
class _Call:
    """The call of a collective by one member.

    Attributes:
        begun, ended, waited, called: of the call, and of its wait for members, in nanoseconds of its clock.
        synchronizes: no member can leave the collective before all have called it.
        last: the member that it waited for; -1: none, or unknown.
        late: that member called later.
    """

    tid: int
    begun: int
    ended: int
    failed: bool
    synchronizes: bool
    last: int = -1
    waited: int = 0
    called: int = 0
    late: bool = False


@dataclass(slots=True)
class _MergedRank:
    """A rank in the merged file; ``tids``: numbers of tracks by group and lane."""

    rank: TracedRank
    pid: int = -1
    label: str = ""
    tids: dict[tuple[str, int], int] = field(default_factory=dict)


@dataclass(slots=True)
class _Awaited:
    """The waits for one rank: their number, and nanoseconds by the waiting rank."""

    times: int = 0
    by: dict[int, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.by.values())


class _Inputs:
    """The first pass over the files."""

    def __init__(self, paths: list[Path], job: str | None) -> None:
        self.paths: list[Path] = []
        self.processes: dict[_Member, _MergedRank] = {}
        self.calls: dict[_Collective, dict[int, _Call]] = {}
        self.awaited: dict[_Member, _Awaited] = {}
        self.dropped: list[str] = []
        self.operations = 0
        self._files: dict[_Member, Path] = {}
        jobs: dict[str, None] = {}
        for path in paths:
            file = read_rank(path)
            jobs[file.rank.job] = None
            if job is None or job == file.rank.job:
                try:
                    self._add(file)
                except MalformedMessage as error:
                    raise click.ClickException(
                        f"{path} is damaged: {error}; remove it to merge the other files"
                    ) from None
        if job is not None and job not in jobs:
            raise click.ClickException(f"no trace of job {job!r}; there are traces of {', '.join(jobs)}")
        if job is None and len(jobs) > 1:
            raise click.ClickException(
                f"the traces are of several jobs: {', '.join(jobs)}; choose one with --job, or give each "
                "run a directory of its own"
            )
        self._label()
        self.offsets = self._align()
        self._find_last()

    def _add(self, file: RankInput) -> None:
        rank = file.rank
        member = member_of(rank)
        process = self.processes.get(member)
        if process is None:
            process = self.processes[member] = _MergedRank(rank)
            self._files[member] = file.path
        elif (process.rank.pid, process.rank.clock) != (rank.pid, rank.clock):
            raise click.ClickException(
                f"{self._files[member]} and {file.path} are both of rank {rank.rank} of job {rank.job!r}, in "
                "different processes: give each run of the job a directory of its own"
            )
        self.paths.append(file.path)
        if file.dropped:
            rest = " and all later ones" if file.truncated else ""
            self.dropped.append(f"{file.path.name} lacks {counted(file.dropped, 'operation')}{rest}")
        elif file.truncated:
            self.dropped.append(f"{file.path.name} lacks all operations after a write failed (disk full?)")
        latest: dict[int, tuple[int, _Call]] = {}  # by track: the number and call of the latest collective
        for event in file.events:
            if event.ph in ("X", "b", "i") and event.cat in (COLLECTIVE, KEYED, MESSAGE):
                self.operations += 1
            if event.ph != "X" or event.cat not in (COLLECTIVE, WAIT):
                continue
            number = number_of(event.args, "number")
            begun, ended = _interval(file, event)
            if event.cat == COLLECTIVE:
                synchronizes = event.name == "barrier" or (
                    event.name in SYNCHRONIZING and event.args.get("bytes") != 0
                )
                failed = event.args.get("failed") is True
                call = _Call(track(process, file, event.tid), begun, ended, failed, synchronizes)
                latest[event.tid] = number, call
                key = _Collective(member.world, file.lane(event.tid).ident, number)
                self.calls.setdefault(key, {})[rank.rank] = call
            elif event.tid in latest and latest[event.tid][0] == number:
                call = latest[event.tid][1]
                call.last, call.waited, call.called = number_of(event.args, "last"), begun, ended

    def _label(self) -> None:
        """Number the processes as their ranks, where that is possible, and name them."""
        epochs = {each.world[1] for each in self.processes}
        meetings = {each.world[2] for each in self.processes}
        hosts = {each.rank.host for each in self.processes.values()}
        free = max(member.rank for member in self.processes)
        pids: set[int] = set()
        for member, process in sorted(self.processes.items()):
            if member.rank in pids:
                free += 1
            process.pid = member.rank if member.rank not in pids else free
            pids.add(process.pid)
            process.label = (
                f"rank {member.rank}"
                + (f" of restart {member.world[1]}" if len(epochs) > 1 else "")
                + (f" of meeting {member.world[2]!r}" if len(meetings) > 1 and member.world[2] else "")
                + (f" on {process.rank.host.split('/')[0]}" if len(hosts) > 1 else "")
            )

    def _find_last(self) -> None:
        """Determine for which member each rank waited, and whether that member was late.

        A rank knows one member that was missing when it last checked.  If others arrived before the rank was
        scheduled again, the last one of all is found by the times of their calls.  A member that called
        earlier than the waiting rank was not late: its data was under way.
        """
        for key, calls in self.calls.items():
            begins = {
                rank: self.shifted(self.processes[_Member(key.world, rank)].rank, call.begun)
                for rank, call in calls.items()
            }
            latest = -1
            if all(call.synchronizes and not call.failed for call in calls.values()):
                latest = max(begins, key=lambda rank: begins[rank])
            for rank, call in calls.items():
                if not call.called:
                    continue
                if (call.last == -1 or call.last in calls) and latest not in (-1, rank):
                    call.last = latest
                call.late = call.last >= 0 and (call.last not in begins or begins[call.last] > begins[rank])
                if call.late:
                    awaited = self.awaited.setdefault(_Member(key.world, call.last), _Awaited())
                    awaited.times += 1
                    awaited.by[rank] = awaited.by.get(rank, 0) + call.called - call.waited

    def shifted(self, rank: TracedRank, time: int) -> int:
        """Convert a time of the clock of a rank to that of the reference."""
        return time - self.offsets[rank.clock].offset

    def label(self, member: _Member) -> str:
        """The name of a rank, which may have no file."""
        process = self.processes.get(member)
        return f"rank {member.rank} (no trace)" if process is None else process.label

    def missing(self) -> list[int]:
        """The ranks that have no trace."""
        sizes: dict[_World, int] = {}
        for member, process in self.processes.items():
            sizes[member.world] = max(sizes.get(member.world, 0), process.rank.size)
        return sorted(
            {rank for world, size in sizes.items() for rank in range(size)}
            - {member.rank for member in self.processes}
        )

    def _align(self) -> dict[str, ClockOffset]:
        """Estimate the offset of each clock; the reference is that of the first rank."""
        bounds = ClockBounds()
        clock_of = {member: process.rank.clock for member, process in self.processes.items()}
        for key, calls in self.calls.items():
            completed = {rank: call for rank, call in calls.items() if not call.failed}
            clocks = {rank: clock_of[_Member(key.world, rank)] for rank in completed}
            if len(set(clocks.values())) < 2:
                continue
            for rank, call in completed.items():
                if call.called and (last := completed.get(call.last)) is not None:
                    bounds.add(clocks[call.last], last.begun, clocks[rank], call.called)
            if all(call.synchronizes for call in completed.values()):
                begins: dict[str, int] = {}
                ends: dict[str, int] = {}
                for rank, call in completed.items():
                    clock = clocks[rank]
                    begins[clock] = max(begins.get(clock, call.begun), call.begun)
                    ends[clock] = min(ends.get(clock, call.ended), call.ended)
                for one, begun in begins.items():
                    for other, ended in ends.items():
                        bounds.add(one, begun, other, ended)
        first = min(self.processes.values(), key=lambda process: process.rank.rank).rank
        ahead = {each.rank.clock: each.rank.begun - each.rank.realtime for each in self.processes.values()}
        return bounds.offsets(first.clock, ahead)


class _Output:
    """The second pass: makes the events of the merged file."""

    def __init__(self, inputs: _Inputs, torch: list[Path]) -> None:
        self._inputs = inputs
        self.torch: list[tuple[Path, _MergedRank]] = []
        self.unmatched: list[Path] = []
        times = [self._inputs.shifted(each.rank, each.rank.begun) for each in inputs.processes.values()]
        for path in torch:
            file = read_torch(path)
            process = self._process_of(file)
            if process is None:
                self.unmatched.append(path)
                continue
            self.torch.append((path, process))
            times += [
                self._torch_time(process, file, event["ts"]) for event in file.events if _is_timed(event)
            ]
        self._timeline = chrome_trace.Timeline(min(times))
        self.flows = 0

    def _torch_time(self, process: _MergedRank, file: TorchInput, microseconds: float) -> int:
        rank = process.rank
        return self._inputs.shifted(rank, file.time(microseconds) - rank.realtime + rank.begun)

    def _process_of(self, file: TorchInput) -> _MergedRank | None:
        """The rank whose process torch.profiler recorded; None if it is unknown or ambiguous."""
        processes = list(self._inputs.processes.values())
        same_rank = [each for each in processes if file.rank is None or each.rank.rank == file.rank]
        same_pid = [each for each in same_rank if each.rank.pid in file.pids]
        for found in (same_pid, same_rank if file.rank is not None else []):
            if len(found) == 1:
                return found[0]
        return None

    def events(self) -> Iterator[object]:
        """All events, in any order."""
        for process in self._inputs.processes.values():
            yield chrome_trace.process_name(process.pid, process.label)
            yield chrome_trace.process_order(process.pid, 10 * process.pid)
        for index, path in enumerate(self._inputs.paths):
            yield from self._of_rank(read_rank(path), index)
        yield from self._flows()
        for index, (path, process) in enumerate(self.torch, 1):
            yield from self._of_torch(read_torch(path), process, index * _TORCH_PIDS)

    def _of_rank(self, file: RankInput, index: int) -> Iterator[RankEvent]:
        member = member_of(file.rank)
        process = self._inputs.processes[member]
        for event in file.events:
            if event.ph == "M" and event.name != "thread_name":
                continue
            tid = event.tid
            event.pid, event.tid = process.pid, track(process, file, tid)
            if event.ts is not msgspec.UNSET:
                event.ts = self._timeline.time(self._inputs.shifted(file.rank, file.time(event.ts)))
            if event.id:
                event.id = f"{index}.{event.id}"
            if event.ph == "X" and event.cat in (COLLECTIVE, WAIT) and "last" in event.args:
                key = _Collective(member.world, file.lane(tid).ident, number_of(event.args, "number"))
                call = self._inputs.calls.get(key, {}).get(member.rank)
                if call is not None and call.called:
                    event.args["last"] = call.last
                    if event.cat == WAIT:
                        event.name = wait_name(call.last)
            yield event

    def _flows(self) -> Iterator[chrome_trace.Event]:
        """Arrows from the last member of a collective to those that waited for it."""
        for key, calls in self._inputs.calls.items():
            waiting: dict[int, list[tuple[_MergedRank, _Call]]] = {}
            for rank, call in calls.items():
                if call.late and call.last in calls and not call.failed:
                    process = self._inputs.processes[_Member(key.world, rank)]
                    waiting.setdefault(call.last, []).append((process, call))
            for rank, members in waiting.items():
                last = calls[rank]
                process = self._inputs.processes[_Member(key.world, rank)]
                ident = str(self.flows)
                begin = self._inputs.shifted(process.rank, last.begun)
                yield self._flow("s", ident, process, last, begin)
                for process, call in members:
                    # Within the slice of the wait, whose end is not part of it.
                    end = max(self._inputs.shifted(process.rank, call.called) - 1, begin)
                    yield {**self._flow("f", ident, process, call, end), "bp": "e"}
                self.flows += 1

    def _flow(
        self, phase: str, ident: str, process: _MergedRank, call: _Call, time: int
    ) -> chrome_trace.Event:
        return {
            "name": FLOW, "cat": FLOW, "ph": phase, "id": ident, "pid": process.pid, "tid": call.tid,
            "ts": self._timeline.time(time),
        }  # fmt: skip

    def _of_torch(self, file: TorchInput, process: _MergedRank, first_pid: int) -> Iterator[dict[str, Any]]:
        pids: dict[int | str, int] = {}
        for event in file.events:
            if "pid" in event:
                name = event["pid"]
                if name not in pids:
                    pids[name] = first_pid + len(pids)
                    yield chrome_trace.process_order(pids[name], 10 * process.pid + 1)
                event["pid"] = pids[name]
            if event["ph"] == "M":
                event.pop("ts", None)
                if event.get("name") == "process_sort_index":
                    continue
                if event.get("name") == "process_name":
                    event = chrome_trace.process_name(
                        event["pid"], f"{process.label}, torch: {event.get('args', {}).get('name', '')}"
                    )
            if _is_timed(event):
                event["ts"] = self._timeline.time(self._torch_time(process, file, event["ts"]))
            if isinstance(event.get("id"), int):  # unique in its file
                event["id"] = hex(first_pid << 32 | event["id"] & 0xFFFFFFFF)
            yield event

    def other(self) -> dict[str, Any]:
        """``otherData`` of the merged file."""
        inputs = self._inputs
        return {
            "schema": SCHEMA,
            "ranks": [
                {"pid": process.pid, "name": process.label, "process": process.rank}
                for process in inputs.processes.values()
            ],
            "clocks": {
                clock: {
                    "offset_us": each.offset / 1e3,
                    "error_us": None if each.error is None else each.error / 1e3,
                    "source": each.source,
                }
                for clock, each in inputs.offsets.items()
            },
            "waited_for": [
                {"name": inputs.label(member), "times": each.times, "seconds": each.total / 1e9}
                for member, each in _by_total(inputs.awaited)
            ],
            "missing": inputs.missing(),
            "dropped": inputs.dropped,
        }


def merge_traces(directory: Path, output: Path, job: str | None) -> Iterator[str]:
    """Merge the traces in a directory into one file; yield the lines of a summary.

    Raises:
        click.ClickException: a file cannot be read or is damaged, files contradict each other, or the output
            cannot be written.
    """
    ranks, torch = find(directory)
    inputs = _Inputs(ranks, job)
    made = _Output(inputs, torch)
    try:
        with AtomicFile(output, mode=0o600) as draft:
            if output.suffix == ".gz":
                with gzip.GzipFile(fileobj=draft.file, mode="wb", mtime=0) as compressed:
                    chrome_trace.write_trace(compressed, made.events(), made.other())
            else:
                chrome_trace.write_trace(draft.file, made.events(), made.other())
            draft.replace()
    except OSError as error:
        raise click.ClickException(f"{output} cannot be written: {error.strerror or error}") from None
    yield from _summary(inputs, made, output)


def _summary(inputs: _Inputs, made: _Output, output: Path) -> Iterator[str]:
    yield (
        f"{output}: {counted(len(inputs.processes), 'rank')}, {counted(inputs.operations, 'operation')}, "
        f"{counted(made.flows, 'arrow')} to waiting ranks; open it at https://ui.perfetto.dev"
    )
    hosts = {each.rank.clock: each.rank.hostname for each in inputs.processes.values()}
    for clock, offset in inputs.offsets.items():
        if offset.source != "reference":
            error = "unknown" if offset.error is None else f"at most {format_duration(offset.error / 1e9)}"
            yield (
                f"the clock of host {hosts[clock]} is {offset.offset / 1e9:+.6f} s ahead, error {error} "
                f"(from {offset.source})"
            )
    if missing := inputs.missing():
        yield f"no trace of {ranks_named(missing)}"
    yield from inputs.dropped
    for path in made.unmatched:
        yield f"{path.name} was left out: torch.profiler recorded another process than those of the traces"
    for member, awaited in _by_total(inputs.awaited)[:_SHOWN]:
        by = ", ".join(f"rank {rank}: {format_duration(ns / 1e9)}" for rank, ns in sorted(awaited.by.items()))
        yield (
            f"{inputs.label(member)} was waited for {counted(awaited.times, 'time')}, for "
            f"{format_duration(awaited.total / 1e9)} in total ({by})"
        )
    if not inputs.awaited:
        yield "no rank waited for another one"


def _by_total(awaited: dict[_Member, _Awaited]) -> list[tuple[_Member, _Awaited]]:
    return sorted(awaited.items(), key=lambda item: -item[1].total)


def member_of(rank: TracedRank) -> _Member:
    """The place of a rank among all that can be in a directory."""
    return _Member((rank.job, rank.epoch, rank.meeting), rank.rank)


def track(process: _MergedRank, file: RankInput, tid: int) -> int:
    """The number of the track of a lane, the same one for all files of a rank."""
    lane = file.lane(tid)
    return process.tids.setdefault((lane.ident, lane.number), len(process.tids))


def _is_timed(event: dict[str, Any]) -> bool:
    """Whether an event of torch.profiler has a time, and is not a name."""
    return "ts" in event and event["ph"] != "M"


def _interval(file: RankInput, event: RankEvent) -> tuple[int, int]:
    """Begin and end of a slice, in nanoseconds of the clock of the rank."""
    assert isinstance(event.ts, float)  # checked when it was read
    assert isinstance(event.dur, float)
    return file.time(event.ts), file.time(event.ts + event.dur)
