"""Whether a connection is encrypted: the one place that decides it.

``SHOAL_TLS`` decides for every connection over TCP whose bytes Python carries.  One whose socket is handed
to the native core stays as it is, and its callers say so.  Unix sockets never leave the host.  ``ssl`` is
imported when it is needed: that takes longer than the rest of this package.
"""

from __future__ import annotations

import socket
from typing import Protocol

from ... import config
from ..stream import ByteStream


class EncryptedStream(ByteStream, Protocol):
    """A stream that is plain until :meth:`encrypt` is called, and encrypted from then on."""

    def encrypt(self) -> bool:
        """Go on with the TLS handshake as far as the stream below lets it; whether it has succeeded.

        Nothing but the handshake may be read or written until it has.

        Raises:
            AuthenticationError: one side does not take the other's certificate.
            WireError: what came is no such handshake.  OSError: the other side is gone.
        """

    @property
    def clogged(self) -> bool:
        """Whether encrypted bytes wait for room: then the descriptor must be writable before it goes on."""

    @property
    def certificate(self) -> bytes:
        """SHA-256 of the certificate that the accepting side has shown."""


class Side(Protocol):
    """How one side encrypts its connections."""

    def stream(self, below: ByteStream, /) -> EncryptedStream:
        """The stream on ``below``, which it owns from now on."""


def encryption(sock: socket.socket, *, connecting: bool) -> Side | None:
    """How the connection on a socket, or those to a listening one, are encrypted; None: they are not.

    The accepting side makes its key and certificate here, or reads them and the authority's; once for all
    connections to a listener.

    Raises:
        ConfigurationError: the certificates cannot be made or used, or are there although nothing is to be
            encrypted.
    """
    if sock.family == socket.AF_UNIX:
        return None
    if not config.TLS.get():
        config.tls_files()
        return None
    from . import certificates

    return certificates.connecting_side() if connecting else certificates.accepting_side()
