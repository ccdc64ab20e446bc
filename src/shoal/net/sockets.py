"""Listening, and connecting with authentication, over TCP and over unix sockets of this host.

Unix sockets are in the abstract namespace: such a socket has a name but no file, so no file remains after
SIGKILL. Names are visible to all users of the host: both sides refuse processes of other users before the
handshake.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from ..common.deadline import Deadline
from ..common.formatting import format_seconds
from ..errors import AuthenticationError, UsageError, WireError, WireTimeout
from .addresses import refuse_other_users, resolve
from .authentication import authenticate
from .connection import DEFAULT_LIMIT, Connection
from .stream import close_in_forked_child

#: maximum number of pending connections; the kernel limits it to net.core.somaxconn
BACKLOG = 4096


def listen(host: str, port: int = 0, *, secret: bytes = b"", public: bool = False) -> socket.socket:
    """Return a listening TCP socket, close-on-exec and blocking.

    Args:
        host: address or name of an interface of this host; ``0.0.0.0`` or ``::`` for all of them.
        port: 0: chosen by the kernel, see ``getsockname()[1]``.
        secret: with which clients will have to authenticate.
        public: clients need not authenticate.

    Raises:
        UsageError: the address can be reached from other hosts, there is no secret, and it is not public.
        WireError: the address does not belong to this host, or is in use.
    """
    family, address = resolve(host or "0.0.0.0", port)[0]
    if not (secret or public) and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        raise UsageError(
            f"refusing to listen on {host or address[0]!r} without a secret: others could connect. "
            "Set SHOAL_SECRET (or SHOAL_SECRET_FILE) to the same value in every process of the job, "
            "or listen on 127.0.0.1"
        )
    return _listening(family, address, f"{host}:{port}")


def listen_unix(name: str) -> socket.socket:
    """Return a listening unix socket with an abstract name, for an :class:`~shoal.net.Acceptor`.

    Raises:
        UsageError: the name is empty or longer than 107 bytes.
        WireError: the name is taken.
    """
    return _listening(socket.AF_UNIX, _unix_address(name), f"unix socket {name!r}")


def _listening(family: int, address: Any, name: str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise WireError(f"cannot listen on {name}: {error.strerror or error}") from error
    close_in_forked_child(sock)
    return sock


def connect(
    host: str,
    port: int,
    *,
    secret: bytes,
    purpose: str,
    timeout: float,
    limit: int = DEFAULT_LIMIT,
    plain: bool = False,
) -> Connection:
    """Connect to ``host:port`` and authenticate.

    Args:
        secret: of the job.
        purpose: short ASCII word; the listener must expect the same.
        timeout: seconds for connecting and handshake together, excluding name resolution.
        limit: maximum length of a message in bytes.
        plain: never encrypt, because the socket will be detached; otherwise ``SHOAL_TLS`` decides.  Must be
            the same on both sides.

    Raises:
        AuthenticationError, VersionMismatch: the handshake failed.
        ConfigurationError: the certificates named in the environment cannot be used.
        WireTimeout: connection and handshake did not complete in time.
        WireError: no listener, or the connection was lost during the handshake (``__cause__`` is an
            ``OSError``), or the other side is not shoal or has another purpose.
    """
    deadline = Deadline(timeout)
    sock = _connect_tcp(host, port, deadline)
    return authenticate(sock, True, secret, purpose, deadline, limit, plain, peer=f"{host}:{port}")


def connect_unix(
    name: str, *, secret: bytes, purpose: str, timeout: float, limit: int = DEFAULT_LIMIT
) -> Connection:
    """Connect to the abstract ``name`` and authenticate.  Arguments and errors are those of ``connect``.

    If there is no listener, the other process usually is on another host or in another network namespace.
    A listener of another user raises AuthenticationError.
    """
    deadline = Deadline(timeout)
    sock = _connect_socket(socket.AF_UNIX, _unix_address(name), f"unix socket {name!r}", deadline)
    return authenticate(sock, True, secret, purpose, deadline, limit)


def configure_socket(sock: socket.socket) -> None:
    """Set TCP_NODELAY and keepalive on a TCP socket.

    Raises AuthenticationError if it is a unix socket whose other end belongs to another user.
    """
    if sock.family == socket.AF_UNIX:
        refuse_other_users(sock)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def _connect_tcp(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Connect to the first address of ``host`` that accepts."""
    failure: WireError | None = None
    for family, address in resolve(host, port):
        try:
            return _connect_socket(family, address, f"{host}:{port}", deadline)
        except WireTimeout:
            raise
        except WireError as error:
            failure = error
    assert failure is not None
    raise failure


def _connect_socket(family: int, address: Any, name: str, deadline: Deadline) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(deadline.remaining(), 1e-6))
        sock.connect(address)
        if family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
            # No listener: the kernel may choose the same ephemeral port as our own port.
            raise ConnectionRefusedError("no listener at this port")
        configure_socket(sock)
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError):
            raise WireTimeout(f"no connection to {name} within {format_seconds(deadline.timeout)}") from error
        if isinstance(error, OSError) and not isinstance(error, AuthenticationError):
            raise WireError(f"cannot connect to {name}: {error.strerror or error}") from error
        raise
    return sock


def _unix_address(name: str) -> bytes:
    address = b"\0" + name.encode()
    if not 2 <= len(address) <= 108:
        raise UsageError(f"unix socket name {name!r}: expected 1 to 107 bytes")
    return address
