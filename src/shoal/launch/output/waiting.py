"""The table of ``shoal run --summary``: what the ranks did, and for whom they waited."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from ...common.formatting import counted
from ...common.text_table import text_table
from ...failure_report import Report, WaitSummary
from ..ranks.rank import JobProcess

#: share of the time from which a rank that others waited for is named
_NAMED_FROM = 0.01
#: share of its own time from which the line of a named rank also has for whom it waited
_WAITED_ITSELF_FROM = 0.5
_HEADINGS = ("rank", "operations", "MB", "p50 us", "p99 us", "seconds", "waited s", "waited %", "most for")


class WaitingTable:
    """Collects the summaries that ranks report when they close a world."""

    def __init__(self) -> None:
        #: of each world that a process closed, the ranks being indices of processes
        self._reports: list[tuple[JobProcess, Report]] = []

    def add(self, process: JobProcess, report: Report) -> None:
        if report.summary is not None:
            self._reports.append((process, report))

    def lines(self, processes: Sequence[JobProcess]) -> Iterator[bytes]:
        """The text for the end of the job of these processes."""
        if not self._reports:
            yield b"shoal: no rank has reported a summary: none has closed a group of the native backend\n"
            return
        names = {process.index: process.name for process in processes}
        self._reports.sort(key=lambda each: each[0].index)
        rows = [self._row(process, report, names) for process, report in self._reports if report.summary]
        for line in text_table(_HEADINGS, rows).strip("\n").splitlines():
            yield f"shoal: {line}\n".encode()
        for line in self._stragglers(names):
            yield f"shoal: {line}\n".encode()
        reported = {process.index for process, _ in self._reports}
        if missing := [process.name for process in processes if process.index not in reported]:
            yield f"shoal: no summary of rank {', '.join(missing)}\n".encode()

    def _row(self, process: JobProcess, report: Report, names: dict[int, str]) -> tuple[str, ...]:
        summary = report.summary
        assert summary is not None
        share = summary.waited_s / summary.seconds if summary.seconds else 0.0
        most = max(zip(report.ranks, summary.late, strict=True), key=lambda each: each[1][1], default=None)
        return (
            process.name,
            f"{summary.completed:,}",
            f"{summary.bytes / 1e6:,.1f}",
            f"{summary.p50_s * 1e6:,.0f}",
            f"{summary.p99_s * 1e6:,.0f}",
            f"{summary.seconds:.1f}",
            f"{summary.waited_s:.1f}",
            f"{100 * share:.0f}",
            "" if most is None else f"rank {names.get(most[0], '?')}, {_share(most[1][1], summary)}",
        )

    def _stragglers(self, names: dict[int, str]) -> Iterator[str]:
        """A line for each rank for which the others waited for long, the worst one first."""
        waited: dict[int, float] = defaultdict(float)
        times: dict[int, Counter[int]] = defaultdict(Counter)  # by the rank that waited
        spans = self._spans()
        for process, report in self._reports:
            assert report.summary is not None
            for index, (count, spent) in zip(report.ranks, report.summary.late, strict=True):
                waited[index] += spent
                times[index][process.index] += count
        for index, spent in sorted(waited.items(), key=lambda each: -each[1]):
            seconds = sum(span for other, span in spans.items() if other != index)
            if spent > _NAMED_FROM * seconds > 0:
                share = _percentage(spent, seconds)
                most = max(times[index].values())
                last = f", which arrived last in {counted(most, 'operation')}" if most else ""
                yield (
                    f"operations of the others waited {share} of the time for rank {names.get(index, '?')}"
                    f"{last}{self._own_waiting(index, spans.get(index, 0.0), names)}"
                )

    def _spans(self) -> dict[int, float]:
        """The seconds in which each process was in a world, or in several at the same time."""
        worlds = [
            (report.at - report.summary.seconds, report.at, process.index)
            for process, report in self._reports
            if report.summary is not None
        ]
        spans: dict[int, float] = defaultdict(float)
        counted_to: dict[int, float] = defaultdict(lambda: -math.inf)
        for begin, end, index in sorted(worlds):
            spans[index] += max(end - max(begin, counted_to[index]), 0.0)
            counted_to[index] = max(end, counted_to[index])
        return spans

    def _own_waiting(self, index: int, seconds: float, names: dict[int, str]) -> str:
        """The end of the line of a rank that itself waited: it may be late because of another one.

        It was in a world for ``seconds``.
        """
        waited = 0.0
        late: dict[int, float] = defaultdict(float)
        for process, report in self._reports:
            if process.index == index and report.summary is not None:
                waited += report.summary.waited_s
                for other, (_, spent) in zip(report.ranks, report.summary.late, strict=True):
                    late[other] += spent
        if not seconds or waited <= _WAITED_ITSELF_FROM * seconds:
            return ""
        most = f", most for rank {names.get(max(late, key=lambda each: late[each]), '?')}" if late else ""
        return f" (its own operations waited {_percentage(waited, seconds)} of the time{most})"


def _percentage(waited: float, seconds: float) -> str:
    """The share of waiting.  Operations that wait at the same time count each, so it is at most 100 %."""
    return f"{min(100 * waited / seconds, 100):.0f} %"


def _share(spent: float, summary: WaitSummary) -> str:
    return f"{100 * spent / summary.waited_s:.0f} %" if summary.waited_s else "0 %"
