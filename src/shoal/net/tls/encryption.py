"""The decision whether a connection is encrypted.

``SHOAL_TLS`` decides for TCP connections, except those whose sockets are passed to the native core: for them
the callers pass ``plain=True``.  Unix sockets are not encrypted, since they do not leave the host.  ``ssl``
is only imported if needed, since its import takes longer than that of the rest of this package.
"""

from __future__ import annotations

import socket
from typing import Protocol

from ... import config
from ..stream import ByteStream


class EncryptedStream(ByteStream, Protocol):
    """A stream that is unencrypted until :meth:`encrypt` is called."""

    def encrypt(self) -> bool:
        """Continue the TLS handshake without blocking; return whether it has succeeded.

        Until then no other data may be read or written.

        Raises:
            AuthenticationError: one side rejects the certificate of the other.
            WireError: received data is not a TLS handshake.  OSError: the connection is lost.
        """

    @property
    def clogged(self) -> bool:
        """Whether there are unsent encrypted bytes: wait until the descriptor is writable."""

    @property
    def certificate(self) -> bytes:
        """SHA-256 of the certificate of the accepting side."""


class Side(Protocol):
    """The TLS configuration of one side."""

    def stream(self, below: ByteStream, /) -> EncryptedStream:
        """Return a stream that wraps and owns ``below``."""


def encryption(sock: socket.socket, *, connecting: bool) -> Side | None:
    """Return the TLS configuration for a socket, or for all connections to a listener; None: no encryption.

    The accepting side generates or reads its key and certificate here.

    Raises:
        ConfigurationError: the certificates cannot be generated or used, or are set without ``SHOAL_TLS``.
    """
    if sock.family == socket.AF_UNIX:
        return None
    if not config.TLS.get():
        config.tls_files()
        return None
    from . import certificates

    return certificates.connecting_side() if connecting else certificates.accepting_side()
