"""Accepting one connection, for tests; the package uses ``Acceptor`` and ``Server``."""

from __future__ import annotations

import socket

from shoal.common.formatting import format_seconds
from shoal.errors import WireError, WireTimeout
from shoal.net import HANDSHAKE_TIMEOUT_S, Connection, Deadline
from shoal.net.authentication import authenticate
from shoal.net.connection import DEFAULT_LIMIT
from shoal.net.sockets import configure_socket


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

    Raises:
        WireTimeout: no peer connected within ``timeout`` seconds, or the handshake timed out.
        AuthenticationError, VersionMismatch, WireError: the handshake failed.
    """
    deadline = Deadline(timeout)
    try:
        listener.settimeout(max(deadline.remaining(), 1e-6))
        sock, _ = listener.accept()
    except TimeoutError as error:
        raise WireTimeout(f"nobody connected within {format_seconds(timeout)}") from error
    except OSError as error:
        raise WireError(f"cannot accept a connection: {error.strerror or error}") from error
    try:
        configure_socket(sock)
    except BaseException:
        sock.close()
        raise
    handshake = Deadline(min(deadline.remaining(), HANDSHAKE_TIMEOUT_S))
    return authenticate(sock, False, secret, purpose, handshake, limit, plain)
