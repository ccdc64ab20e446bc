"""The exchange of file descriptors and of shared memory over unix sockets."""

from __future__ import annotations

import array
import errno
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from ..common.deadline import Deadline
from ..errors import UsageError, WireError
from .addresses import peer_credentials
from .connection import Connection

#: the kernel's limit for descriptors in one message (SCM_MAX_FD)
_MAX_FDS = 253
_FDS_MESSAGE = b"shoal fds\0\0\0"


def peer_pid(connection: Connection) -> int:
    """Return the process id of the other side of a unix connection, from the kernel.

    It is the process that connected or listened; 0 if it is in another pid namespace.
    """
    return peer_credentials(connection.socket)[0]


def pid_of(pidfd: int) -> int:
    """Return the process id of the process that a received descriptor refers to, in the mounted ``/proc``.

    Raises:
        WireError: it is not the pidfd of a process that runs and that this process can see.
    """
    try:
        found = re.search(r"^Pid:\s*(-?\d+)$", Path(f"/proc/self/fdinfo/{pidfd}").read_text(), re.MULTILINE)
    except OSError as error:
        raise WireError(f"cannot read which process a descriptor refers to: {error}") from error
    if found is None or int(found[1]) <= 0:
        raise WireError("received a descriptor that does not refer to a running process")
    return int(found[1])


def send_fds(connection: Connection, fds: Sequence[int], timeout: float) -> None:
    """Send duplicates of open descriptors, which are not closed here.

    Raises:
        UsageError: not 1 to 253 descriptors.
        WireTimeout, WireError: see ``Connection.send``.
    """
    if not 1 <= len(fds) <= _MAX_FDS:
        raise UsageError(f"{len(fds)} descriptors: expected 1 to {_MAX_FDS}")
    deadline = Deadline(timeout)
    while True:
        connection.wait_writable(deadline)
        try:
            sent = socket.send_fds(connection.socket, [_FDS_MESSAGE], list(fds))
        except BlockingIOError:
            continue
        except OSError as error:
            raise WireError(f"cannot send descriptors to {connection.peer}: {error}") from error
        # The descriptors were sent with the first byte.
        connection.write(_FDS_MESSAGE[sent:], deadline)
        return


def recv_fds(connection: Connection, count: int, timeout: float) -> list[int]:
    """Receive exactly ``count`` descriptors, close-on-exec, sent with one :func:`send_fds`.

    Raises:
        WireTimeout: they did not arrive in time.
        WireError: something else arrived (received descriptors are closed), or the connection is lost.
    """
    deadline = Deadline(timeout)
    data, fds = b"", list[int]()
    try:
        while not data:
            connection.wait_readable(deadline)
            data, fds = _recvmsg(connection, count)
        data += connection.read(len(_FDS_MESSAGE) - len(data), deadline)
        if data != _FDS_MESSAGE or len(fds) != count:
            raise WireError(f"{connection.peer} sent {len(fds)} descriptors, expected {count}")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def _recvmsg(connection: Connection, count: int) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    try:
        data, ancillary, flags, _ = connection.socket.recvmsg(
            len(_FDS_MESSAGE), socket.CMSG_SPACE(count * fds.itemsize), socket.MSG_CMSG_CLOEXEC
        )
    except BlockingIOError:
        return b"", []
    except OSError as error:
        raise WireError(f"lost the connection to {connection.peer}: {error}") from error
    if not data:
        raise WireError(f"{connection.peer} closed the connection")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not fds and flags & socket.MSG_CTRUNC:
        full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise WireError(f"cannot receive descriptors from {connection.peer}: {full.strerror}") from full
    return data, list(fds)
