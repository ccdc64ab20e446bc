"""The ranks that run on this machine, found and read without their cooperation.

Every rank of the native backend keeps a status page in its shared memory (``cpp/engine/status_page.h``).
This is a file without a name: other processes of the user find it among the rank's descriptors in ``/proc``.
So ranks that hang or are stopped are found too, whatever started them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ._core import RankStatus, read_status

#: the name under which /proc shows the memory of a rank
_MEMORY = "/memfd:shoal (deleted)"
#: seconds after which the descriptors of a known process are listed again
_SEARCH_INTERVAL_S = 5.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process that is a rank, or one of its ranks: ranks may be threads.

    Attributes:
        pid: process id, in the namespace of the reader.
        job: name of the job.
        leader: the process of the first rank that shares memory with this one; 0: there is no other.
        rank, size: its rank, and the number of ranks.
        state: state of the process in ``/proc/PID/stat``, such as ``"S"``, or ``"T"`` for stopped.
        cpu_s: CPU time that the process has used, in seconds.
        memory: resident memory, in bytes.
        pages: its status pages. A program that calls ``shoal.init`` and uses torch's functions has two, of
            the same job, rank and size; they count as one rank.
    """

    pid: int
    job: str
    leader: int
    rank: int
    size: int
    state: str
    cpu_s: float
    memory: int
    pages: list[RankStatus]

    @property
    def started(self) -> int:
        """When the first of the pages was made, in nanoseconds of CLOCK_MONOTONIC."""
        return min(page.started for page in self.pages)

    @property
    def written(self) -> int:
        """When the last of the pages was written, likewise."""
        return max(page.written for page in self.pages)


class _Stat:
    """The used fields of ``/proc/PID/stat``."""

    def __init__(self, pid: int) -> None:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        self.state = fields[0].decode()
        self.cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        self.start = int(fields[19])
        self.memory = int(fields[21]) * _PAGE_BYTES


class _KnownProcess:
    """A process, whose descriptors are listed only if it may have new pages.

    Attributes:
        start: its start time, which tells it from a later one with the same process id.
    """

    def __init__(self, pid: int, start: int) -> None:
        self._pid, self.start = pid, start
        self._list()
        #: number of its pages since the last search
        self._count = 0
        #: number of worlds that it had opened before its descriptors were listed
        self._worlds = 0

    def search(self) -> None:
        """List its descriptors again: a process of which no page is known may have one now."""
        self._list()
        self._count = 0

    def pages(self) -> list[RankStatus]:
        pages = _pages(self._pid, self._fds)
        worlds = max((page.worlds for page in pages), default=0)
        if worlds > self._worlds or len(pages) < self._count:  # it may have a new one
            self._list()
            pages = _pages(self._pid, self._fds)
        self._count, self._worlds = max(len(pages), self._count), max(worlds, self._worlds)
        return pages

    def _list(self) -> None:
        self._fds = list(_memory_descriptors(self._pid))


class RankFinder:
    """Finds the ranks of this machine that the user may see; remembers their descriptors between calls."""

    def __init__(self) -> None:
        self._search_at = 0.0
        self._known: dict[int, _KnownProcess] = {}

    def find(self) -> list[RankProcess]:
        """Read all ranks, ordered by process id.  Processes that end meanwhile are left out."""
        found: dict[tuple[int, str, int, int, int], RankProcess] = {}
        pids = sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
        now = time.monotonic()
        search_all = now >= self._search_at
        if search_all:
            self._search_at = now + _SEARCH_INTERVAL_S
        for pid in pids:
            # Other users' processes, and those that have ended.
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = _Stat(pid)
                known = self._known.get(pid)
                if known is None or known.start != stat.start:
                    known = self._known[pid] = _KnownProcess(pid, stat.start)
                elif search_all:
                    known.search()
                for page in known.pages():
                    key = (pid, page.job, page.leader, page.rank, page.size)
                    new = RankProcess(*key, stat.state, stat.cpu_s, stat.memory, [])
                    found.setdefault(key, new).pages.append(page)
        for pid in self._known.keys() - set(pids):
            del self._known[pid]
        return list(found.values())


def _memory_descriptors(pid: int) -> Iterator[int]:
    directory = f"/proc/{pid}/fd"
    for name in os.listdir(directory):
        with contextlib.suppress(OSError):
            if os.readlink(f"{directory}/{name}") == _MEMORY:
                yield int(name)


def _pages(pid: int, fds: list[int]) -> list[RankStatus]:
    return [page for fd in fds if (page := _read(pid, fd)) is not None]


def _read(pid: int, fd: int) -> RankStatus | None:
    """Read the page of a rank of ``pid``; None if it is none, has not connected, or has closed."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if os.readlink(path) != _MEMORY:
            return None
        memory = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may be a pipe
    except OSError:
        return None
    try:
        status = read_status(memory)
    finally:
        os.close(memory)
    if status is None or not status.written or status.closed:
        return None
    # While ranks connect, they have the memory of their peers too.
    return status if status.pid == pid or status.pid == _pid_in_own_namespace(pid) else None


def _pid_in_own_namespace(pid: int) -> int:
    """The process id that a process in a container has for itself."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1])
    return pid
