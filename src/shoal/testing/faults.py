"""Faults for tests: the death of a process, a standstill, a broken connection.

    with processes(fn, 3) as ranks:
        ranks.kill(1)

The functions here take process ids; the methods of :class:`~shoal.testing.Ranks` take ranks, those of
:class:`~shoal.testing.Agents` names of workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import threading
import time
from typing import Any

import psutil

from ..group import ProcessGroup
from ..rpc import Agent

#: number of the system call pidfd_getfd, the same on all machines (Linux 5.6)
_PIDFD_GETFD = 438
#: seconds that a process gets to take note of a signal
_TAKES_NOTE = 10.0


def kill(pid: int) -> None:
    """End the process at once (SIGKILL): it cannot tell its peers."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    """Bring the process to a standstill (SIGSTOP), and return when it stands still."""
    os.kill(pid, signal.SIGSTOP)
    process = psutil.Process(pid)
    end = time.monotonic() + _TAKES_NOTE
    while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
        if time.monotonic() > end:
            raise TimeoutError(f"process {pid} does not stop")
        time.sleep(0.001)


def resume(pid: int) -> None:
    """Let a stopped process go on (SIGCONT)."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def delay(pid: int, seconds: float) -> threading.Timer:
    """Bring the process to a standstill for ``seconds``; returns at once, the timer that resumes it."""
    stop(pid)
    timer = threading.Timer(seconds, resume, (pid,))
    timer.daemon = True
    timer.start()
    return timer


def cut(pid: int, other: int, *, local: bool = False) -> int:
    """Break all TCP connections between two processes of this machine, as a network would.

    Both sides see the end of the stream at once.  Needs the right to trace ``pid``, which a parent has.

    Args:
        local: the unix sockets between them too, by which workers of RPC on one host call one another.

    Returns:
        the number of connections that were cut.
    """
    theirs = {connection.laddr for connection in psutil.Process(other).net_connections("tcp")}
    # All are taken before the first is cut: that may already end the process.
    copies = [
        socket.socket(fileno=_descriptor_of(pid, connection.fd))
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.raddr and connection.raddr in theirs and connection.fd >= 0
    ]
    if local:
        copies += _unix_sockets(pid, other)
    for copy in copies:
        with copy, contextlib.suppress(OSError):  # the other side may have closed it
            copy.shutdown(socket.SHUT_RDWR)
    return len(copies)


def sever(whose: ProcessGroup | Agent, other: int | str) -> int:
    """Cut the connections of a member of a group, or of an agent, to another, as a broken cable would.

    Args:
        whose: a group of a backend that can do so (native can), or an agent.
        other: the other end: its rank in the group, or its name as a worker.

    Returns:
        the number of connections that were cut.
    """
    if isinstance(whose, Agent):
        lines = whose.links.with_worker(str(other))
        for line in lines:
            whose.endpoint.post.sever(line.number)
        return len(lines)
    backend: Any = whose._backend
    backend.sever(whose._links.ranks.index(whose._spec.ranks[int(other)]))
    return 1


def hush(whose: ProcessGroup | Agent, silent: bool = True) -> None:
    """Send no heartbeats to other hosts (or send them again), as a host that hangs."""
    if isinstance(whose, Agent):
        whose.endpoint.post.hush(silent)
        return
    backend: Any = whose._backend
    backend.hush(silent)


def die_at(group: ProcessGroup, point: str) -> None:
    """Have this process killed (SIGKILL) when it next reaches a point inside the engine.

    Args:
        group: of the native backend; operations of all its groups count.
        point: ``"writing"``: a part of the result of an all-reduce in shared memory is written to everybody;
            ``"reduced"``: all of this rank's part is, and the others have been told; ``"finished"``: an
            operation of any kind is complete here, and the program has not heard so; ``"gave up"``: a rank of
            this host that stands still is marked as given up, and nobody has been told.
    """
    backend: Any = group._backend
    backend.die_at(point)


def _unix_sockets(pid: int, other: int) -> list[socket.socket]:
    """Copies of the unix sockets of ``pid`` that ``other`` connected to, or listened for."""
    found = []
    for connection in psutil.Process(pid).net_connections("unix"):
        if connection.fd < 0 or connection.type != socket.SOCK_STREAM:
            continue
        copy = socket.socket(fileno=_descriptor_of(pid, connection.fd))
        try:
            raw = copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:  # nobody is at the other end
            raw = bytes(struct.calcsize("3i"))
        if struct.unpack("3i", raw)[0] == other:
            found.append(copy)
        else:
            copy.close()
    return found


def _descriptor_of(pid: int, descriptor: int) -> int:
    """A descriptor of ours for the file behind another process's."""
    if pid == os.getpid():
        return os.dup(descriptor)
    handle = os.pidfd_open(pid)
    try:
        copy = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, descriptor, 0))
    finally:
        os.close(handle)
    if copy < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot reach into process {pid}: {os.strerror(code)}")
    return copy
