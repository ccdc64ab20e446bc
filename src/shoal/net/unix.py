"""Unix sockets in the abstract namespace, with which processes of one host exchange file descriptors.

Such a socket has a name but no file, so no file remains after SIGKILL.  Names are visible to all users of the
host: both sides refuse processes of other users before the handshake.
"""

from __future__ import annotations

import array
import errno
import os
import socket
from collections.abc import Sequence

from ..common.deadline import Deadline
from ..common.wording import in_seconds
from ..errors import AuthenticationError, UsageError, WireError, WireTimeout
from .connection import DEFAULT_LIMIT, Connection
from .credentials import peer_credentials, refuse_other_users
from .inherit import close_in_forked_child
from .sockets import BACKLOG, authenticate

#: the kernel's limit for descriptors in one message (SCM_MAX_FD)
_MAX_FDS = 253
_MARK = b"shoal fds\0\0\0"


def listen_unix(name: str) -> socket.socket:
    """Return a listening unix socket with an abstract name, for :func:`~shoal.net.accept`.

    Raises:
        UsageError: the name is empty or longer than 107 bytes.
        WireError: the name is taken.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_address(name))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise WireError(f"cannot listen on unix socket {name!r}: {error.strerror or error}") from error
    except UsageError:
        sock.close()
        raise
    close_in_forked_child(sock)
    return sock


def connect_unix(
    name: str, *, secret: bytes, purpose: str, timeout: float, limit: int = DEFAULT_LIMIT
) -> Connection:
    """Connect to the abstract ``name`` and authenticate.  Arguments and errors are those of ``connect``.

    If there is no listener, the other process usually is on another host or in another network namespace.
    A listener of another user raises AuthenticationError.
    """
    deadline = Deadline(timeout)
    address = _address(name)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(deadline.remaining(), 1e-6))
        sock.connect(address)
        refuse_other_users(sock)
    except TimeoutError as error:
        sock.close()
        raise WireTimeout(f"no connection to unix socket {name!r} within {in_seconds(timeout)}") from error
    except AuthenticationError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise WireError(f"cannot connect to unix socket {name!r}: {error.strerror or error}") from error
    return authenticate(sock, True, secret, purpose, deadline, limit)


def peer_pid(connection: Connection) -> int:
    """Return the process id of the other side of a unix connection, from the kernel.

    It is the process that connected or listened; 0 if it is in another pid namespace.
    """
    return peer_credentials(connection.socket)[0]


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
            sent = socket.send_fds(connection.socket, [_MARK], list(fds))
        except BlockingIOError:
            continue
        except OSError as error:
            raise WireError(f"cannot send descriptors to {connection.peer}: {error}") from error
        # The descriptors were sent with the first byte.
        connection.write(_MARK[sent:], deadline)
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
        data += connection.read(len(_MARK) - len(data), deadline)
        if data != _MARK or len(fds) != count:
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
            len(_MARK), socket.CMSG_SPACE(count * fds.itemsize), socket.MSG_CMSG_CLOEXEC
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


def _address(name: str) -> bytes:
    address = b"\0" + name.encode()
    if not 2 <= len(address) <= 108:
        raise UsageError(f"unix socket name {name!r}: expected 1 to 107 bytes")
    return address
