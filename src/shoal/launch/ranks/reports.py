"""The launcher's end of the ranks' reports of failure.

A rank runs the user's program, so what comes from it may be anything.  Everything is checked here: a report
that is too long, malformed or names ranks that are not there is dropped, and so is all that comes after the
first few.
"""

from __future__ import annotations

import socket
import time

from ...common.decoding import MalformedMessage, from_msgpack
from ...failure_report import LONGEST, Report, descriptor_name

#: reports that are read from one rank, until one says that it has rebuilt a group
_MOST = 24


class Reports:
    """The reports of one rank.

    Args:
        size: number of ranks in the job.

    Attributes:
        inherited: the descriptor that the rank must inherit, until :meth:`started`.
        received: what was reported of failures since the last rebuild of a group, the earliest first.
        joined: whether it has reported that it joined a world.
        changes: how many reports were accepted so far.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._begin = time.monotonic()
        self._left, self._is_rebuilt = _MOST, False
        self._mine, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._mine.setblocking(False)
        self._theirs.setblocking(False)  # a rank does not wait for the launcher to read
        self.inherited = self._theirs.fileno()
        self.received: list[Report] = []
        self.joined = False
        self.changes = 0
        self._notices: list[Report] = []

    @property
    def variables(self) -> dict[str, str]:
        """The variable that names the descriptor to the rank."""
        return {"SHOAL_REPORT_FD": descriptor_name(self.inherited)}

    def started(self) -> None:
        """The rank has its copy."""
        self._theirs.close()

    def read(self) -> None:
        """Read the reports that have come since the last call; never blocks."""
        while self._left > 0:
            try:
                data, _, flags, _ = self._mine.recvmsg(LONGEST)
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
            self._left, self._is_rebuilt = _MOST, False

    def take_notices(self) -> tuple[Report, ...]:
        """The reports of meetings and evictions that were read since the last call."""
        notices, self._notices = tuple(self._notices), []
        return notices

    def fileno(self) -> int:
        """Readable when there is something to :meth:`read`."""
        return self._mine.fileno()

    @property
    def ended(self) -> bool:
        """Whether nothing is read any more."""
        return self._left == 0

    def close(self) -> None:
        """Let go of the descriptors."""
        self._mine.close()
        self._theirs.close()

    def _take(self, data: bytes) -> None:
        try:
            report = from_msgpack(data, Report)
        except MalformedMessage:
            return
        # Not NaN either, and not outside of the time in which the rank can have sent it.
        if not self._begin <= report.at <= time.monotonic():
            return
        if not report.meeting and any(rank >= self._size for rank in report.ranks):
            return
        self.changes += 1
        if report.kind == "rebuilt":
            self._is_rebuilt = True
            self.received.clear()
        elif report.kind == "joined":
            self.joined = True
        elif report.kind in ("met", "evicted"):
            if len(self._notices) < _MOST:
                self._notices.append(report)
        else:
            self.received.append(report)
