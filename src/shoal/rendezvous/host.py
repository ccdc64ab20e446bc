"""The machine and process identity of a process, and the addresses of this machine."""

from __future__ import annotations

import ipaddress
import math
import os
import socket
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LOOPBACK = "127.0.0.1"

#: stands for facts that /proc does not provide; a process with such an identity is never considered dead
_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Here:
    """The identity of a process and its machine.

    Attributes:
        machine: identity of the kernel and network namespace. Processes with equal values can reach each
            other over loopback, whatever ``SHOAL_HOST_ID`` is.
        process: unique identity of the process: PID namespace, PID and start time (in ticks since the
            machine's boot, which changes of its clock do not affect).
    """

    machine: str
    process: str


def here() -> Here:
    """Return the identity of the calling process and its machine."""
    return Here(machine_id(), f"{_pid_namespace()}/{os.getpid()}/{start_of(os.getpid())}")


def now() -> float:
    """Return the seconds since this machine's boot, including time in suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def started() -> float:
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


def process_is_gone(process: str) -> bool:
    """Return whether ``process`` (of :class:`Here`, on this machine) has ended; False if unknown.

    A zombie has ended, unless it is a program whose first thread ended before the others.
    """
    namespace, pid, start = process.rsplit("/", 2)
    if namespace != _pid_namespace() or _UNKNOWN in (namespace.partition(":")[2], start):
        return False
    state = _state(int(pid))
    if state is None:
        # It ended, or /proc hides processes of other users.
        return not _exists(int(pid))
    found, ended, _ = state
    return ended or found != start


def process_is_stopped(process: str) -> bool:
    """Return whether a signal such as SIGSTOP has stopped ``process`` (of :class:`Here`, on this machine).

    False if unknown, and for a process that a debugger has stopped.
    """
    namespace, pid, start = process.rsplit("/", 2)
    if namespace != _pid_namespace():
        return False
    state = _state(int(pid))
    return state is not None and state[0] == start and state[2]


def start_of(pid: int) -> str:
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


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of ``host``, IPv4 first; OSError if the name is unknown."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    ordered = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in ordered))


def loopback_trouble() -> str:
    """Return why processes of this machine cannot reach each other over loopback; "" if they can."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((LOOPBACK, 9))  # looks up the route, and sends nothing
        except OSError as error:
            return (
                f"the loopback interface of this machine does not work ({error.strerror}), over which its "
                "processes reach each other; bring it up: ip link set lo up"
            )
    return ""


def is_loopback(address: str) -> bool:
    """Return whether the numeric ``address`` is a loopback address."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def is_mine(address: str) -> bool:
    """Return whether the numeric ``address`` belongs to this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def address_towards(target: str) -> str:
    """Return this machine's address on the route to the numeric address ``target``; send nothing.

    For a loopback target, return the address of the default route, which other machines can reach.
    """
    if is_loopback(target):
        target = "2001:db8::1" if ":" in target else "192.0.2.1"  # for documentation: uses the default route
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])
