"""The identity of a process, by which other processes of its machine determine whether it has ended."""

from __future__ import annotations

import enum
import math
import os
import socket
import time
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

#: stands for facts that /proc does not provide; the status of a process with such an identity is unknown
_UNKNOWN = "unknown"

#: ``PID namespace/PID/start time``; the pattern keeps invalid process ids from the kernel
Process = Annotated[str, msgspec.Meta(pattern=r"^[^/]+/[1-9][0-9]{0,8}/[^/]+\Z", max_length=1000)]


class ProcessStatus(enum.Enum):
    """The state of a process, as far as this process knows it."""

    ALIVE = enum.auto()
    DEAD = enum.auto()
    UNKNOWN = enum.auto()  #: it runs on another machine, in another PID namespace, or /proc hides it


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process, identified uniquely over machines, containers and time.

    A base class of the records that processes exchange, whose fields are validated when they are decoded.

    Attributes:
        machine: identity of the kernel and network namespace, as of :func:`machine_id`. Processes with equal
            values can reach each other over loopback, whatever ``SHOAL_HOST_ID`` is.
        process: PID namespace, PID and start time, separated by slashes. The start time is in ticks since the
            machine's boot, which changes of its clock do not affect.
    """

    machine: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
    process: Process

    @staticmethod
    def current() -> ProcessIdentity:
        """Return the identity of the calling process."""
        pid = os.getpid()
        return ProcessIdentity(machine_id(), f"{_pid_namespace()}/{pid}/{start_ticks(pid)}")

    @property
    def pid(self) -> int:
        """The process id, in the process's own namespace."""
        return int(self.process.split("/")[1])

    @property
    def hostname(self) -> str:
        """The host name of the machine, for messages."""
        return self.machine.split("/")[0]

    def status(self) -> ProcessStatus:
        """Return whether the process is alive.

        A zombie is dead, unless it is a program whose first thread ended before the others.
        """
        namespace, _, start = self.process.rsplit("/", 2)
        if not self._is_visible() or _UNKNOWN in (namespace.partition(":")[2], start):
            return ProcessStatus.UNKNOWN
        state = _state(self.pid)
        if state is None:
            # It ended, or /proc hides processes of other users.
            return ProcessStatus.UNKNOWN if _exists(self.pid) else ProcessStatus.DEAD
        found, ended, _ = state
        return ProcessStatus.DEAD if ended or found != start else ProcessStatus.ALIVE

    def is_dead(self) -> bool:
        """Return whether the process has certainly ended; False if unknown."""
        return self.status() is ProcessStatus.DEAD

    def is_stopped(self) -> bool:
        """Return whether a signal such as SIGSTOP has stopped the process.

        False if unknown, and for a process that a debugger has stopped.
        """
        state = _state(self.pid) if self._is_visible() else None
        return state is not None and state[0] == self.process.rsplit("/", 1)[1] and state[2]

    def _is_visible(self) -> bool:
        return self.machine == machine_id() and self.process.rsplit("/", 2)[0] == _pid_namespace()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.hostname}"


def now() -> float:
    """Return the seconds since this machine's boot, including time in suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def process_start_time() -> float:
    """Return the time, as of :func:`now`, at which this process was started; infinity if unknown.

    Exact in a process that was forked after the import of this module. Other processes know only the clock
    tick of 10 ms, of which this is the end: events in other processes during that tick count as earlier.
    """
    if _forked_at is not None:
        return _forked_at
    state = _state(os.getpid())
    return math.inf if state is None else (int(state[0]) + 1) / os.sysconf("SC_CLK_TCK")


def _note_fork() -> None:
    global _forked_at
    _forked_at = now()


_forked_at: float | None = None
os.register_at_fork(after_in_child=_note_fork)


@cache
def machine_id() -> str:
    """Return ``hostname/boot id/network namespace``.

    Containers on one machine share the boot id but cannot reach each other over loopback, and the host name
    alone is too often "localhost".
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown-boot"
    return f"{socket.gethostname()}/{boot}/{_namespace('net')}"


@cache
def clock_id() -> str:
    """Return an identity of CLOCK_MONOTONIC: processes with equal values read the same clock."""
    return f"{machine_id().split('/')[1]}/{_namespace('time')}"


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return f"{kind}:{_UNKNOWN}"


def _pid_namespace() -> str:
    """Return the PID namespace of both ``os.getpid`` and ``/proc``; unknown if they differ."""
    try:
        if os.readlink("/proc/self") == str(os.getpid()):
            return _namespace("pid")
    except OSError:
        pass
    return f"pid:{_UNKNOWN}"


def start_ticks(pid: int) -> str:
    """Return a process's start time in ticks since the machine's boot; ``unknown`` if unavailable."""
    state = _state(pid)
    return _UNKNOWN if state is None else state[0]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _state(pid: int) -> tuple[str, bool, bool] | None:
    """Return a process's start time in ticks, whether it is a zombie, and whether a signal has stopped it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses, and may itself contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return fields[19], fields[0] in "ZXx" and int(fields[17]) <= 1, fields[0] == "T"
