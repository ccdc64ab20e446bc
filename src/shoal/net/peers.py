"""Connections between two processes of a job, over a unix socket if they are on one host, else over TCP.

Each side sends one hello, the connecting side first.  Over a unix socket both can then exchange descriptors
of shared memory.  In the end the core takes over the bare socket, so these connections are never encrypted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from ..common.deadline import Deadline
from ..common.decoding import MalformedMessage, from_msgpack
from ..errors import WireError
from .acceptor import MAX_PENDING, Acceptor
from .connection import Connection
from .sockets import connect, connect_unix, listen, listen_unix
from .unix import peer_pid, pid_of, recv_fds, send_fds

H = TypeVar("H", bound=msgspec.Struct)
T = TypeVar("T")

_RESOURCE_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class PeerConnection(Generic[H]):
    """A connection to another process of the job, from :func:`send_hello` or :func:`receive_hello`.

    Attributes:
        hello: of the other side.
        pid: of the other process; 0 over TCP.
        memory_fd: descriptor of the other side's shared memory; -1: none.
    """

    def __init__(self, connection: Connection, hello: H) -> None:
        self.connection = connection
        self.hello = hello
        self.is_local = connection.socket.family == socket.AF_UNIX
        self.pid = peer_pid(connection) if self.is_local else 0
        self.memory_fd = -1

    def share_memory(self, fds: Sequence[int], timeout: float, *, with_process: bool = False) -> None:
        """Send the descriptors ``fds``, which are not closed here, and receive the other side's memory.

        Args:
            with_process: the other side is not the rank itself: it also sends a pidfd of the rank, from which
                ``pid`` is set.

        Raises:
            WireError: the other side sent something else, or that process has ended.
        """
        send_fds(self.connection, fds, timeout)
        if not with_process:
            (self.memory_fd,) = recv_fds(self.connection, 1, timeout)
            return
        self.memory_fd, process_fd = recv_fds(self.connection, 2, timeout)
        try:
            self.pid = pid_of(process_fd)
        finally:
            os.close(process_fd)

    def detach(self) -> tuple[int, int]:
        """Return the descriptors of the socket and of the other side's memory, owned by the caller now."""
        memory_fd, self.memory_fd = self.memory_fd, -1
        return self.connection.detach(), memory_fd

    def close(self) -> None:
        """Close the descriptors that were not detached."""
        self.connection.close()
        if self.memory_fd >= 0:
            os.close(self.memory_fd)
            self.memory_fd = -1


def send_hello(connection: Connection, mine: H, timeout: float) -> PeerConnection[H]:
    """Send the hello ``mine`` on a connection that this side made, and receive that of the other side.

    The connection is owned from now on.  Raises like ``Connection.recv``, and WireError for an invalid hello.
    """
    with _closed_on_error(connection):
        connection.send(msgspec.msgpack.encode(mine), timeout)
        return PeerConnection(connection, _received(connection, type(mine), timeout))


def receive_hello(
    connection: Connection, kind: type[H], answer: Callable[[H], H], timeout: float
) -> PeerConnection[H]:
    """Receive the hello of the connecting side, and send the hello ``answer(it)``; see :func:`send_hello`."""
    with _closed_on_error(connection):
        hello = _received(connection, kind, timeout)
        connection.send(msgspec.msgpack.encode(answer(hello)), timeout)
        return PeerConnection(connection, hello)


def _received(connection: Connection, kind: type[H], timeout: float) -> H:
    try:
        return from_msgpack(connection.recv(timeout), kind)
    except MalformedMessage as error:
        raise WireError(f"received an invalid hello from {connection.peer}: {error}") from error


@contextlib.contextmanager
def _closed_on_error(connection: Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


class PeerTransport:
    """Listens for other processes of the job on a unix and a TCP socket, and connects to theirs.

    Args:
        interface: address that the TCP listener binds to.

    Attributes:
        unix: name of the unix socket.
        port: of the TCP socket.
        acceptors: of the two; each may be used by one thread.
    """

    def __init__(
        self, interface: str, *, secret: bytes, purpose: str, max_pending: int = MAX_PENDING
    ) -> None:
        self._secret = secret
        self._purpose = purpose
        self.unix = f"shoal-{purpose}-{secrets.token_hex(12)}"
        with contextlib.ExitStack() as undo:
            unix = undo.enter_context(listen_unix(self.unix))
            tcp = undo.enter_context(listen(interface, secret=secret))
            self.port: int = tcp.getsockname()[1]
            self.acceptors = [
                undo.enter_context(
                    Acceptor(each, secret=secret, purpose=purpose, most_pending=max_pending, plain=True)
                )
                for each in (unix, tcp)
            ]
            undo.pop_all()

    def connect(
        self,
        unix: str,
        address: str,
        port: int,
        *,
        local: bool,
        deadline: Deadline,
        establish: Callable[[Connection], T],
    ) -> T:
        """Connect to a process, over its unix socket if it is ``local`` and that succeeds, else over TCP.

        Args:
            establish: exchanges hellos and memory on the new connection, which it owns; its result is
                returned.  If it raises WireError on the unix socket, the two cannot share memory, for
                example because they are in different network namespaces, and TCP is tried.

        Raises like :func:`~shoal.net.connect` and ``establish``.
        """
        if local:
            try:
                return establish(
                    connect_unix(unix, secret=self._secret, purpose=self._purpose, timeout=_left(deadline))
                )
            except WireError as error:
                if resource_error(error):
                    raise
        return establish(
            connect(
                address, port, secret=self._secret, purpose=self._purpose, timeout=_left(deadline), plain=True
            )
        )

    def close(self) -> None:
        """Close the listeners and the connections that were not accepted."""
        for acceptor in self.acceptors:
            acceptor.close()

    def __enter__(self) -> PeerTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _left(deadline: Deadline) -> float:
    return max(deadline.remaining(), 0.001)


def resource_error(error: BaseException) -> OSError | None:
    """Return the system's error for a lack of descriptors or memory, if ``error`` is or was caused by one."""
    for cause in (error, error.__cause__):
        if isinstance(cause, OSError) and cause.errno in _RESOURCE_ERRNOS:
            return cause
    return None
