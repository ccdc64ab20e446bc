"""Reports of a rank about failures to its launcher, which distinguishes causes from consequences.

The rank that fails first is often not the first to end: its peers may end while it still notifies them and
closes its groups.  So each rank of ``shoal run`` inherits a descriptor and sends reports, with the time:

- ``failed``: an uncaught exception ends it, or it could not connect;
- ``left``: it aborts a group, or closes the world, which others may still need;
- ``told``: it was notified that others failed or left, and which;
- ``rebuilt``: it goes on without failed ranks, so its earlier reports do not explain its end any more;
- ``joined``: it started later than the initial ranks, and has joined them;
- ``met``: it has a rank in a later meeting, of newcomers and ranks;
- ``evicted``: it goes on without ranks that did not vote in an agreement or are lost, and may still run;
- ``ended``: its exit code after an uncaught exception;
- ``summary``: what it did in a world that it closes, if the launcher asked for it.

A rank reports before it notifies its peers, so the report of a cause is earlier than those of its
consequences.  A rank that dies at once (a signal, ``os._exit``) reports nothing, but ranks that lost it do.

Without such a launcher the functions do nothing.  Forked children and executed programs of a rank do not have
the descriptor, and cannot report for the rank.

At the signal :data:`STACKS` of the launcher a rank writes the stacks of all threads to stderr.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import signal
import stat
import time
from collections.abc import Collection
from typing import Annotated, Literal

import msgspec

from . import config
from .common.formatting import describe_error
from .errors import ConfigurationError
from .net import close_in_forked_child

#: limits of a report: characters of the text, number of ranks, and bytes in total
LONGEST_TEXT, MAX_RANKS, MAX_REPORT_BYTES = 200, 64, 2048

#: maximum numbers of summaries, and of other reports, of one process until it rebuilds a group; the launcher
#: reads at most 24
_MAX_SUMMARIES, _MAX_REPORTS = 10, 12

#: the signal at which a rank of a launcher writes its stacks; a signal that programs rarely use
STACKS = signal.SIGRTMAX - 5

Kind = Literal["failed", "left", "told", "rebuilt", "joined", "met", "evicted", "ended", "summary"]
_Rank = Annotated[int, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]  # nor NaN

#: maximum number of late ranks in a summary
MAX_LATE = 16


class WaitSummary(msgspec.Struct, frozen=True, array_like=True):
    """The counters of a rank in one world; see :class:`shoal.statistics.GroupStatistics`.

    Attributes:
        seconds: from the creation of the world until it was closed.
        completed, bytes: operations, and their bytes.
        waited_s: time that they waited for other ranks.
        p50_s, p99_s: latencies; 0 if no operation has completed.
        late: for each rank in ``ranks`` of the report, in how many completed operations it arrived last,
            and the seconds for which this rank waited for it.
    """

    seconds: _Seconds
    completed: _Count
    bytes: _Count
    waited_s: _Seconds
    p50_s: _Seconds
    p99_s: _Seconds
    late: Annotated[tuple[tuple[_Count, _Seconds], ...], msgspec.Meta(max_length=MAX_LATE)] = ()


class Report(msgspec.Struct, frozen=True):
    """One report.

    Attributes:
        at: time of the event, in seconds of CLOCK_MONOTONIC, which all processes of a host share.
        ranks: failed ranks (``told``), evicted ranks (``evicted``), the rank of this process (``met``), or
            the ranks for which it waited (``summary``); empty if unknown.
        meeting: short hash of the name of the meeting that numbered ``ranks``; "": the first meeting, with
            the launcher's numbers.
        code: exit code (``ended``), not 0.
        text: description of the exception (``failed``).
        summary: only of a ``summary``.
    """

    kind: Kind
    at: float
    ranks: Annotated[tuple[_Rank, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    code: Annotated[int, msgspec.Meta(ge=1, le=255)] | None = None
    text: Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)] = ""
    meeting: Annotated[str, msgspec.Meta(max_length=16)] = ""
    summary: WaitSummary | None = None


def descriptor_name(fd: int) -> str:
    """The value of ``SHOAL_REPORT_FD`` for ``fd``, with the inode, because descriptors are reused."""
    return f"{fd}:{os.fstat(fd).st_ino}"


class _Descriptor:
    def __init__(self, fd: int, inode: int) -> None:
        self._fd = fd
        self._inode = inode

    def is_there(self) -> bool:
        """Whether the descriptor is still the one that the launcher passed to this process."""
        if self._fd < 0:
            return False
        try:
            status = os.fstat(self._fd)
        except OSError:
            return False
        return stat.S_ISSOCK(status.st_mode) and status.st_ino == self._inode

    def send(self, report: bytes) -> None:
        """Send a report, unless that would block."""
        with contextlib.suppress(OSError):
            if self.is_there():
                os.write(self._fd, report)

    def close(self) -> None:
        """Close this process's copy."""
        if self.is_there():
            os.close(self._fd)
        self._fd = -1


def _inherited() -> _Descriptor | None:
    try:
        named = config.REPORT_FD.get()
    except ConfigurationError:
        return None
    if named is None:
        return None
    line = _Descriptor(*named)
    if not line.is_there():
        return None
    os.set_inheritable(named[0], False)
    close_in_forked_child(line)
    faulthandler.register(STACKS, file=2, all_threads=True)
    return line


_descriptor = _inherited()


def inherit_again() -> None:
    """Use the descriptor that the environment names now: this process was forked after the first look."""
    global _descriptor
    _descriptor = _inherited()


_reported: set[tuple[Kind, tuple[int, ...], str]] = set()
#: number of summaries since the last rebuild
_summaries = 0
#: whether ranks of meetings without a name have the launcher's numbers
_same_numbers = True


def met(rank: int, size: int, meeting: str = "") -> None:
    """Report that this process is ``rank`` of ``size`` ranks in a meeting.

    Args:
        meeting: name of the meeting, which later reports refer to; "": the first meeting of a job.
    """
    global _same_numbers
    if meeting:
        _report("met", (rank,), meeting=meeting)
    else:
        _same_numbers &= (rank, size) == (config.RANK.get(), config.SIZE.get())


def joined() -> None:
    """Report that this process, which started later than the initial ranks, has joined them."""
    _report("joined")


def failed(error: BaseException) -> None:
    """Report that this rank fails with ``error``; must be called before others are notified."""
    _report("failed", text=describe_error(error))


def left() -> None:
    """Report that this rank leaves a group; must be called before others are notified."""
    _report("left")


def notified(ranks: Collection[int] = (), meeting: str = "") -> None:
    """Report that this rank was notified that ``ranks`` of a meeting failed or left; empty: unknown ones."""
    _report("told", tuple(ranks)[:MAX_RANKS] if meeting or _same_numbers else (), meeting=meeting)


def evicted(ranks: Collection[int], meeting: str = "") -> None:
    """Report that this rank goes on without ``ranks`` of a meeting, whose processes may still run."""
    if ranks and (meeting or _same_numbers):
        _report("evicted", tuple(ranks)[:MAX_RANKS], meeting=meeting)


def summarised(summary: WaitSummary, late: Collection[int], meeting: str = "") -> None:
    """Report what this rank did in a world that it closes; ``late``: the ranks of ``summary.late``."""
    global _summaries
    if (meeting or _same_numbers) and _summaries < _MAX_SUMMARIES:
        _summaries += 1
        _report("summary", tuple(late), meeting=meeting, summary=summary)


def rebuilt() -> None:
    """Report that this rank goes on in a new group, without failed ranks."""
    global _summaries
    if _reported or _summaries:
        _summaries = 0
        _reported.clear()
        _report("rebuilt")


def ended(error: BaseException) -> None:
    """Report that the interpreter exits because of the uncaught ``error``."""
    failed(error)
    # After an uncaught KeyboardInterrupt Python ends by SIGINT, which a shell gives as 130.
    _report("ended", code=130 if isinstance(error, KeyboardInterrupt) else 1)


def _report(
    kind: Kind,
    ranks: tuple[int, ...] = (),
    code: int | None = None,
    text: str = "",
    meeting: str = "",
    summary: WaitSummary | None = None,
) -> None:
    """Send a report, but one of the same kind, ranks and meeting only once; a summary always."""
    known = kind, ranks, meeting
    if summary is None and (known in _reported or len(_reported) >= _MAX_REPORTS):
        return
    if _descriptor is not None:
        words = text.encode("utf-8", "backslashreplace").decode()[:LONGEST_TEXT]
        short = meeting and hashlib.blake2b(meeting.encode(), digest_size=8).hexdigest()
        report = Report(kind, time.monotonic(), ranks, code, words, short, summary)
        _descriptor.send(msgspec.msgpack.encode(report))
    if summary is None:
        # Not before: otherwise another thread with the same report could notify its peers before it is sent.
        _reported.add(known)
