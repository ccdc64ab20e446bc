"""Receives reports of failures from ranks.

A rank runs the program of the user and may send anything, so reports are checked here.  Reports that are too
long, malformed or name unknown ranks are dropped, as are all reports after the first ``_MAX_REPORTS``.
"""

from __future__ import annotations

import socket
import time

import msgspec

from ...common.decoding import MalformedMessage, from_msgpack
from ...failure_report import MAX_REPORT_BYTES, Report

#: maximum number of reports to read from one rank until it reports that it has rebuilt a group
_MAX_REPORTS = 24


class Reports:
    """The reports of one rank of a job of ``size`` ranks.

    Attributes:
        inherited: the descriptor that the rank must inherit; closed by :meth:`started`.
        received: reports of failures since the last rebuild of a group, the earliest first.
        joined: whether it has reported that it joined a world.
        rebuilds: number of reports that it goes on in a group without failed ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._begin = time.monotonic()
        self._left, self._is_rebuilt = _MAX_REPORTS, False
        self._mine, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._mine.setblocking(False)
        self._theirs.setblocking(False)  # a rank does not wait for the launcher to read
        self.inherited = self._theirs.fileno()
        self.received: list[Report] = []
        self.joined = False
        self.rebuilds = 0
        self._notices: list[Report] = []

    def started(self) -> None:
        """Close the rank's end here, after the rank has inherited it."""
        self._theirs.close()

    def read(self) -> None:
        """Read the reports that have come since the last call; never blocks."""
        while self._left > 0:
            try:
                data, _, flags, _ = self._mine.recvmsg(MAX_REPORT_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data, flags = b"", 0
            if not data:
                self._left, self._is_rebuilt = 0, False
                break
            self._left -= 1
            if not flags & socket.MSG_TRUNC:
                self._take(data)
        self.received.sort(key=lambda report: report.at)
        if self._is_rebuilt:
            self._left, self._is_rebuilt = _MAX_REPORTS, False

    def take_notices(self) -> tuple[Report, ...]:
        """The reports of meetings, evictions and summaries that were read since the last call."""
        notices, self._notices = tuple(self._notices), []
        return notices

    def fileno(self) -> int:
        """The descriptor, which is readable when there are reports to :meth:`read`."""
        return self._mine.fileno()

    @property
    def ended(self) -> bool:
        return self._left == 0

    def close(self) -> None:
        self._mine.close()
        self._theirs.close()

    def _take(self, data: bytes) -> None:
        try:
            report = from_msgpack(data, Report)
        except MalformedMessage:
            return
        # Also rejects NaN: the time must be one at which the rank can have sent the report.
        if not self._begin <= report.at <= time.monotonic():
            return
        if not report.meeting and any(rank >= self._size for rank in report.ranks):
            return
        if (report.kind == "summary") != (report.summary is not None):
            return
        if report.summary is not None and len(report.summary.late) != len(report.ranks):
            return
        if report.kind == "rebuilt":
            self._is_rebuilt = True
            self.rebuilds += 1
            self.received.clear()
        elif report.kind == "joined":
            self.joined = True
        elif report.kind in ("met", "evicted", "summary"):
            if len(self._notices) < _MAX_REPORTS:
                self._notices.append(report)
        else:
            self.received.append(report)


#: maximum number of later meetings to keep; reports are about the latest ones
_MAX_MEETINGS = 64


class MeetingTable:
    """The ranks of the latest meetings, by the index of their processes.

    In the first meeting the ranks are the launcher's numbers.  In a later meeting, of ranks and newcomers,
    rank 1 may be a process that has replaced the first rank 1.  Each process reports its rank in such a
    meeting, so that the launcher can resolve the ranks that other reports name.
    """

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
        found = [place for place, rank in enumerate(report.ranks) if rank in known]
        indices = tuple(known[report.ranks[place]] for place in found)
        summary = report.summary
        if summary is not None:
            summary = msgspec.structs.replace(summary, late=tuple(summary.late[place] for place in found))
        return msgspec.structs.replace(report, ranks=indices, meeting="", summary=summary)
