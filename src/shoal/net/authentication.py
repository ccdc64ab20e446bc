"""The authentication of new connections: the handshake of ``handshake.py`` with I/O, and TLS."""

from __future__ import annotations

import selectors
import socket
from typing import TYPE_CHECKING

from .. import config
from ..common.deadline import Deadline
from ..errors import WireError
from . import stream
from .addresses import peer_name
from .connection import Connection
from .handshake import Handshake
from .stream import ByteStream

if TYPE_CHECKING:
    from .tls.stream import TlsConfig


class PendingHandshake:
    """The handshake of a new connection, without blocking; any number of them can share a selector.

    Call :meth:`step` whenever :attr:`stream`, which owns ``sock``, is ready for :attr:`events`.

    Args:
        secret, purpose: the other side must prove the same.
        tls: None: no encryption.
        defer_proof: the caller of :meth:`step` sends this side's proof (:meth:`take_unsent`) with its next
            data.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        connecting: bool = False,
        secret: bytes,
        purpose: str,
        tls: TlsConfig | None = None,
        defer_proof: bool = False,
    ) -> None:
        self._defer_proof = defer_proof
        self.stream: ByteStream = stream.SocketStream(sock)
        self._tls = None if tls is None else tls.stream(self.stream)
        if self._tls is not None:
            self.stream = self._tls
        self._handshake = Handshake(
            connecting=connecting, secret=secret, purpose=purpose, tls=tls is not None
        )
        self._received = bytearray()
        self._unsent = bytearray(self._handshake.greeting)
        self._flush()

    @property
    def events(self) -> int:
        """The events to wait for: ``EVENT_WRITE`` while there are unsent bytes, else ``EVENT_READ``."""
        stuck = self._unsent or (self._tls is not None and self._tls.has_unsent)
        return selectors.EVENT_WRITE if stuck else selectors.EVENT_READ

    @property
    def failure(self) -> WireError | None:
        """Why the handshake itself failed, not the connection."""
        return self._handshake.failure

    def take_unsent(self) -> bytes:
        """Return and remove the unsent bytes; the caller must send them before other data."""
        take_unsent = bytes(self._unsent)
        self._unsent.clear()
        return take_unsent

    def step(self) -> bool:
        """Continue the handshake without blocking or reading beyond it; return whether it has succeeded.

        Raises :attr:`failure` if it failed, OSError if the connection is lost or closed.
        """
        handshake = self._handshake
        while self._flush():
            if handshake.failure is not None:
                raise handshake.failure  # the reply has been sent
            if handshake.done:
                return True
            if handshake.encrypting:
                assert self._tls is not None
                if not self._tls.encrypt():
                    return False
                self._unsent += handshake.tls_established(self._tls.certificate)
                continue
            view = memoryview(bytearray(handshake.needed - len(self._received)))
            try:
                count = self.stream.recv_into(view)
            except BlockingIOError:
                if self.stream.pending():
                    continue
                return False
            if not count:
                raise ConnectionResetError("it closed the connection during the handshake")
            self._received += view[:count]
            if len(self._received) == handshake.needed:
                self._unsent += handshake.feed(self._received)
                self._received.clear()
                if handshake.done and self._defer_proof:
                    return True
                if self._needs_more:
                    return False
        return False

    @property
    def _needs_more(self) -> bool:
        """Whether the handshake cannot continue before the other side sends more."""
        handshake = self._handshake
        can_go_on = self._unsent or handshake.failure is not None or handshake.encrypting or handshake.done
        return not (can_go_on or self.stream.pending())

    def _flush(self) -> bool:
        """Send as much as the stream accepts; return whether nothing is left."""
        while self._unsent:
            try:
                del self._unsent[: self.stream.send(self._unsent)]
            except BlockingIOError:
                return False
        return True


def encryption_for(sock: socket.socket, *, connecting: bool) -> TlsConfig | None:
    """Return the TLS configuration for a socket, or for all connections to a listener; None: no encryption.

    Connections over TCP are encrypted if ``SHOAL_TLS`` is set, except those whose sockets are passed to the
    native core. Unix sockets do not leave the host. The accepting side generates or reads its key and
    certificate here.

    Raises:
        ConfigurationError: the certificates cannot be generated or used, or are set without ``SHOAL_TLS``.
    """
    if sock.family == socket.AF_UNIX:
        return None
    if not config.TLS.get():
        config.tls_files()
        return None
    from .tls import certificates  # imports ssl, which takes longer than the rest of this package

    return certificates.tls_config(connecting=connecting)


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
    try:
        tls = None if plain else encryption_for(sock, connecting=connecting)
        handshake = PendingHandshake(sock, connecting=connecting, secret=secret, purpose=purpose, tls=tls)
    except BaseException as error:
        name = peer or peer_name(sock)
        sock.close()
        if isinstance(error, OSError) and not isinstance(error, WireError):  # the greeting could not be sent
            raise WireError(f"lost the connection to {name}: {error.strerror or error}") from error
        raise
    connection = Connection(handshake.stream, limit=limit, peer=peer)
    try:
        done = False
        while not done:
            if handshake.events == selectors.EVENT_WRITE:
                connection.wait_writable(deadline)
            else:
                connection.wait_readable(deadline)
            try:
                done = handshake.step()
            except OSError as error:
                raise connection.lost_error(error) from (None if error is handshake.failure else error)
    except BaseException:
        connection.close()
        raise
    return connection
