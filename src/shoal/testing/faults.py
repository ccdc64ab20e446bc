"""Faults for tests: killed and stopped processes, broken connections.

    with processes(fn, 3) as ranks:
        ranks.kill(1)

These functions take process ids. The methods of :class:`~shoal.testing.Ranks` take ranks, those of
:class:`~shoal.testing.Agents` take worker names.
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

#: number of the system call pidfd_getfd (Linux 5.6), the same on all architectures
_PIDFD_GETFD = 438
#: seconds that a process gets to react to a signal
SIGNAL_TIMEOUT_S = 10.0


def kill(pid: int) -> None:
    """Kill the process (SIGKILL); it cannot notify its peers."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    """Stop the process (SIGSTOP); return when it is stopped."""
    os.kill(pid, signal.SIGSTOP)
    process = psutil.Process(pid)
    end = time.monotonic() + SIGNAL_TIMEOUT_S
    while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
        if time.monotonic() > end:
            raise TimeoutError(f"process {pid} does not stop")
        time.sleep(0.001)


def resume(pid: int) -> None:
    """Resume a stopped process (SIGCONT)."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def delay(pid: int, seconds: float) -> threading.Timer:
    """Stop the process for ``seconds``; return the timer that resumes it, immediately."""
    stop(pid)
    timer = threading.Timer(seconds, resume, (pid,))
    timer.daemon = True
    timer.start()
    return timer


def cut(pid: int, other: int, *, local: bool = False) -> int:
    """Break all TCP connections between two processes of this machine, like a network failure.

    Both sides receive the end of the stream at once. Requires permission to trace ``pid``, which a parent
    has.

    Args:
        local: also break unix sockets, which RPC workers on one host use.

    Returns:
        The number of connections that were broken.
    """
    theirs = {connection.laddr for connection in psutil.Process(other).net_connections("tcp")}
    # All descriptors are copied before the first is shut down, which may end the process.
    copies = [
        socket.socket(fileno=_descriptor_of(pid, connection.fd))
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.raddr and connection.raddr in theirs and connection.fd >= 0
    ]
    if local:
        copies += _unix_sockets(pid, other)
    for copy in copies:
        with copy, contextlib.suppress(OSError):  # the peer may have closed it
            copy.shutdown(socket.SHUT_RDWR)
    return len(copies)


def disconnect(owner: ProcessGroup | Agent, other: int | str) -> int:
    """Break the connections of a group's member, or of an agent, to a peer, like a broken cable.

    Args:
        owner: a group of a backend that supports it (native does), or an agent.
        other: the peer: its rank in the group, or its worker name.

    Returns:
        The number of connections that were broken.
    """
    if isinstance(owner, Agent):
        lines = owner.connections.connections_of(str(other))
        for line in lines:
            owner.endpoint.post.disconnect(line.number)
        return len(lines)
    backend: Any = owner._backend
    backend.disconnect(owner._links.ranks.index(owner._spec.ranks[int(other)]))
    return 1


def pause_heartbeats(owner: ProcessGroup | Agent, silent: bool = True) -> None:
    """Suppress heartbeats to other hosts, like a hanging host; ``silent=False`` resumes them."""
    connections: Any = owner.endpoint.post if isinstance(owner, Agent) else owner._backend
    connections.pause_heartbeats(silent)


def die_at(group: ProcessGroup, point: str) -> None:
    """Kill this process (SIGKILL) when it next reaches a point in the engine.

    Args:
        group: a group of the native backend; operations of all groups of this backend count.
        point: ``"writing"``: part of an all-reduce result in shared memory has been written to all ranks;
            ``"reduced"``: this rank's whole part has been written, and the others were notified;
            ``"finished"``: an operation of any kind has completed, and the program was not notified yet;
            ``"gave up"``: a stopped rank of this host is marked as evicted, and no rank was notified yet.
    """
    backend: Any = group._backend
    backend.die_at(point)


def _unix_sockets(pid: int, other: int) -> list[socket.socket]:
    """Copies of the unix sockets of ``pid`` whose peer is ``other``."""
    found = []
    for connection in psutil.Process(pid).net_connections("unix"):
        if connection.fd < 0 or connection.type != socket.SOCK_STREAM:
            continue
        copy = socket.socket(fileno=_descriptor_of(pid, connection.fd))
        try:
            raw = copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:  # the peer has closed it
            raw = bytes(struct.calcsize("3i"))
        if struct.unpack("3i", raw)[0] == other:
            found.append(copy)
        else:
            copy.close()
    return found


def _descriptor_of(pid: int, descriptor: int) -> int:
    """Duplicate a file descriptor of another process into this one."""
    if pid == os.getpid():
        return os.dup(descriptor)
    handle = os.pidfd_open(pid)
    try:
        copy = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, descriptor, 0))
    finally:
        os.close(handle)
    if copy < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot duplicate a descriptor of process {pid}: {os.strerror(code)}")
    return copy
