"""Processes of a job by their ranks in later meetings.

In the first meeting the ranks are the launcher's numbers.  In a later meeting, of ranks and newcomers, rank 1
may be a process that has replaced the first rank 1.  Each process reports its rank in such a meeting, so that
the launcher can resolve the ranks that other reports name.
"""

from __future__ import annotations

import msgspec

from ...failure_report import Report

#: maximum number of later meetings to keep; reports are about the latest ones
_MAX_MEETINGS = 64


class Meetings:
    """The ranks of the latest meetings, by the index of their processes."""

    def __init__(self) -> None:
        self._processes: dict[str, dict[int, int]] = {}

    def add(self, report: Report, index: int) -> None:
        """Add a report of a meeting from the process ``index``."""
        for rank in report.ranks:
            self._processes.setdefault(report.meeting, {})[rank] = index
        while len(self._processes) > _MAX_MEETINGS:
            del self._processes[next(iter(self._processes))]

    def resolved(self, report: Report) -> Report:
        """``report`` with indices of processes instead of ranks; unknown ranks are left out."""
        if not report.meeting:
            return report
        known = self._processes.get(report.meeting, {})
        indices = tuple(known[rank] for rank in report.ranks if rank in known)
        return msgspec.structs.replace(report, ranks=indices, meeting="")
