"""A rank reports its own failure to its launcher, which then tells causes from consequences.

The rank that fails first is often not the first to end: it tells its peers, and closes its groups, while they
end already because of it.  So each rank of ``shoal run`` inherits a descriptor and reports, with the time:

- ``failed``: an exception that nobody caught ends it, or it could not connect;
- ``left``: it aborts a group, or closes the world, which others may still need;
- ``told``: it has heard that others failed or left, and which;
- ``rebuilt``: it goes on without those that failed: what it reported before ends it no more;
- ``joined``: it has come later than the first ranks, and they have taken it in;
- ``met``: it has a rank of a later meeting, in which newcomers and ranks have met;
- ``evicted``: it goes on without ranks that may still run: they have not voted in an agreement, or are lost;
- ``ended``: the exit code that Python gives it after an exception that nobody caught.

A rank reports before it tells its peers, so the report of a cause is earlier than those of its
consequences.  A rank that dies at once (a signal, ``os._exit``) reports nothing; those that lost it name it.

Without such a launcher nothing happens here.  A forked child closes its copy of the descriptor, a program
that the rank executes does not inherit it, and neither speaks for the rank.

The launcher can also ask a rank where it hangs: at :data:`STACKS` the rank writes the stack of every thread
to stderr.
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
from .common.wording import in_words
from .errors import ConfigurationError
from .net import close_in_forked_child

#: characters of a report's text, ranks that it names, and bytes of the whole
LONGEST_TEXT, MOST_RANKS, LONGEST = 200, 64, 2048

#: reports of one process until it rebuilds a group
_MOST_REPORTS = 12

#: the signal at which a rank of a launcher writes its stacks; no other program has a use for it
STACKS = signal.SIGRTMAX - 5

Kind = Literal["failed", "left", "told", "rebuilt", "joined", "met", "evicted", "ended"]
_Rank = Annotated[int, msgspec.Meta(ge=0)]


class Report(msgspec.Struct, frozen=True):
    """One report.

    Attributes:
        at: when it happened, in seconds of CLOCK_MONOTONIC, which all processes of a host share.
        ranks: which ranks have failed, of a ``told``, or are evicted; empty if nothing says which.  Of a
            ``met`` the own one.
        meeting: of ``ranks``: short for the name of the meeting that numbered them; "": the first one, whose
            ranks have the launcher's numbers.
        code: of an ``ended``; a failure's, so never 0.
        text: of a ``failed``: the exception, in words.
    """

    kind: Kind
    at: float
    ranks: Annotated[tuple[_Rank, ...], msgspec.Meta(max_length=MOST_RANKS)] = ()
    code: Annotated[int, msgspec.Meta(ge=1, le=255)] | None = None
    text: Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)] = ""
    meeting: Annotated[str, msgspec.Meta(max_length=16)] = ""


def descriptor_name(fd: int) -> str:
    """``fd`` as ``SHOAL_REPORT_FD`` names it: with its inode, because numbers are used again."""
    return f"{fd}:{os.fstat(fd).st_ino}"


class _Descriptor:
    """The inherited descriptor."""

    def __init__(self, fd: int, inode: int) -> None:
        self._fd = fd
        self._inode = inode

    def is_there(self) -> bool:
        """Whether the descriptor is still what the launcher gave this process."""
        if self._fd < 0:
            return False
        try:
            status = os.fstat(self._fd)
        except OSError:
            return False
        return stat.S_ISSOCK(status.st_mode) and status.st_ino == self._inode

    def send(self, report: bytes) -> None:
        """Send a report if that is possible without waiting."""
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


_line = _inherited()
_reported: set[tuple[Kind, tuple[int, ...], str]] = set()
#: whether the ranks of meetings without a name have the launcher's numbers
_same_numbers = True


def met(rank: int, size: int, meeting: str = "") -> None:
    """This process is ``rank`` of ``size`` that meet.

    Args:
        meeting: its name, by which later reports name its ranks; "": the first meeting of a job.
    """
    global _same_numbers
    if meeting:
        _report("met", (rank,), meeting=meeting)
    else:
        _same_numbers &= (rank, size) == (config.RANK.get(), config.SIZE.get())


def taken_in() -> None:
    """This process came later than the first ranks, and is in a group with them now."""
    _report("joined")


def failed(error: BaseException) -> None:
    """This rank fails with ``error``; to be called before others hear of it."""
    _report("failed", text=in_words(error))


def left() -> None:
    """This rank leaves a group; to be called before others hear of it."""
    _report("left")


def told(ranks: Collection[int] = (), meeting: str = "") -> None:
    """This rank was notified that ``ranks`` of a meeting failed or left, or that some did."""
    _report("told", tuple(ranks)[:MOST_RANKS] if meeting or _same_numbers else (), meeting=meeting)


def evicted(ranks: Collection[int], meeting: str = "") -> None:
    """This rank goes on without ``ranks`` of a meeting, whose processes may still run."""
    if ranks and (meeting or _same_numbers):
        _report("evicted", tuple(ranks)[:MOST_RANKS], meeting=meeting)


def rebuilt() -> None:
    """This rank goes on in a new group, without those that failed."""
    if _reported:
        _reported.clear()
        _report("rebuilt")


def ended(error: BaseException) -> None:
    """The interpreter ends because of ``error``, which nobody caught."""
    failed(error)
    # Python ends by SIGINT, which a shell calls 130, after an interrupt that nobody caught.
    _report("ended", code=130 if isinstance(error, KeyboardInterrupt) else 1)


def _report(
    kind: Kind, ranks: tuple[int, ...] = (), code: int | None = None, text: str = "", meeting: str = ""
) -> None:
    if _line is None or (kind, ranks, meeting) in _reported or len(_reported) >= _MOST_REPORTS:
        return
    words = text.encode("utf-8", "backslashreplace").decode()[:LONGEST_TEXT]
    short = meeting and hashlib.blake2b(meeting.encode(), digest_size=8).hexdigest()
    _line.send(msgspec.msgpack.encode(Report(kind, time.monotonic(), ranks, code, words, short)))
    # Not before: another thread that does the same must not tell its peers first.
    _reported.add((kind, ranks, meeting))
