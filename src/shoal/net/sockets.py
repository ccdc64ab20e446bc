"""Listening, and connecting and accepting with authentication."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from ..common.deadline import Deadline
from ..common.wording import in_seconds
from ..errors import UsageError, WireError, WireTimeout
from . import stream
from .connection import DEFAULT_LIMIT, Connection
from .credentials import refuse_other_users
from .handshake import HANDSHAKE_TIMEOUT_S, Handshake
from .inherit import close_in_forked_child
from .tls.encryption import encryption

#: maximum number of pending connections; the kernel limits it to net.core.somaxconn
BACKLOG = 4096


def listen(host: str, port: int = 0, *, secret: bytes = b"") -> socket.socket:
    """Return a listening TCP socket, close-on-exec and blocking.

    Args:
        host: address or name of an interface of this host; ``0.0.0.0`` or ``::`` for all of them.
        port: 0: chosen by the kernel, see ``getsockname()[1]``.
        secret: with which clients will have to authenticate.

    Raises:
        UsageError: the address can be reached from other hosts and there is no secret.
        WireError: the address does not belong to this host, or is in use.
    """
    family, address = _resolve(host or "0.0.0.0", port)[0]
    if not secret and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        raise UsageError(
            f"refusing to listen on {host or address[0]!r} without a secret: others could connect. "
            "Set SHOAL_SECRET (or SHOAL_SECRET_FILE) to the same value in every process of the job, "
            "or listen on 127.0.0.1"
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise WireError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
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
    sock = _connected(host, port, deadline)
    return authenticate(sock, True, secret, purpose, deadline, limit, plain, peer=f"{host}:{port}")


def listens(host: str, port: int, *, timeout: float) -> bool:
    """Return whether ``host:port`` has a listener; True also after ``timeout`` seconds without an answer."""
    try:
        _connected(host, port, Deadline(timeout)).close()
    except WireTimeout:
        return True
    except WireError:
        return False
    return True


def accept(
    listener: socket.socket,
    *,
    secret: bytes,
    purpose: str,
    timeout: float,
    limit: int = DEFAULT_LIMIT,
    plain: bool = False,
) -> Connection:
    """Accept one connection from a listener (TCP or unix) and authenticate it.

    A failed handshake raises and closes that connection, but not the listener: call again.  The handshake may
    take at most ``HANDSHAKE_TIMEOUT_S`` seconds.

    Args:
        plain: see :func:`connect`.

    Raises:
        WireTimeout: no peer connected within ``timeout`` seconds, or the handshake timed out.
        AuthenticationError, VersionMismatch, WireError: the handshake failed.
    """
    deadline = Deadline(timeout)
    try:
        listener.settimeout(max(deadline.remaining(), 1e-6))
        sock, _ = listener.accept()
    except TimeoutError as error:
        raise WireTimeout(f"nobody connected within {in_seconds(timeout)}") from error
    except OSError as error:
        raise WireError(f"cannot accept a connection: {error.strerror or error}") from error
    try:
        prepare(sock)
    except BaseException:
        sock.close()
        raise
    handshake = Deadline(min(deadline.remaining(), HANDSHAKE_TIMEOUT_S))
    return authenticate(sock, False, secret, purpose, handshake, limit, plain)


def authenticate(
    sock: socket.socket,
    connecting: bool,
    secret: bytes,
    purpose: str,
    deadline: Deadline,
    limit: int,
    plain: bool = False,
    peer: str | None = None,
) -> Connection:
    """Run the handshake on a connected socket, and close the socket if it fails."""
    bare = stream.open_stream(sock)
    try:
        side = None if plain else encryption(sock, connecting=connecting)
        tls = None if side is None else side.stream(bare)
    except BaseException:
        bare.close()
        raise
    connection = Connection(tls or bare, limit=limit, peer=peer)
    try:
        handshake = Handshake(connecting=connecting, secret=secret, purpose=purpose, tls=tls is not None)
        connection.write(handshake.greeting, deadline)
        while not handshake.done:
            reply = handshake.feed(connection.read(handshake.needed, deadline))
            if handshake.encrypting:
                assert tls is not None
                connection.encrypt(tls, deadline)
                reply = handshake.bind(tls.certificate)
            if reply:
                connection.write(reply, deadline)
            if handshake.failure is not None:
                raise type(handshake.failure)(f"{connection.peer}: {handshake.failure}")
    except BaseException:
        connection.close()
        raise
    return connection


def prepare(sock: socket.socket) -> None:
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


def _resolve(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Return the addresses of ``host``, IPv4 first, so that both sides resolve localhost to 127.0.0.1."""
    if not 0 <= port <= 65535:
        raise UsageError(f"port {port}: expected 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise WireError(f"cannot find the address of host {host!r}: {error}") from error
    addresses = [(int(family), address) for family, _, _, _, address in found]
    return sorted(addresses, key=lambda entry: entry[0] != socket.AF_INET)


def _connected(host: str, port: int, deadline: Deadline) -> socket.socket:
    failure: OSError | None = None
    for family, address in _resolve(host, port):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(deadline.remaining(), 1e-6))
            sock.connect(address)
            if sock.getsockname() == sock.getpeername():
                # No listener: the kernel may choose the same ephemeral port as our own port.
                raise ConnectionRefusedError("no listener at this port")
            prepare(sock)
        except TimeoutError as error:
            sock.close()
            raise WireTimeout(
                f"no connection to {host}:{port} within {in_seconds(deadline.timeout)}"
            ) from error
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    assert failure is not None
    raise WireError(f"cannot connect to {host}:{port}: {failure.strerror or failure}") from failure
