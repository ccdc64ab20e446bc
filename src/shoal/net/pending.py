"""The accepting side of a non-blocking handshake; any number of them can share a selector."""

from __future__ import annotations

import selectors
import socket

from ..errors import WireError
from . import stream
from .handshake import Handshake
from .tls.encryption import Side


class PendingHandshake:
    """A handshake on a newly accepted connection.

    Call :meth:`step` whenever :attr:`stream` is ready for :attr:`events`.

    Args:
        sock: owned by :attr:`stream` from now on.
        secret, purpose: the other side must prove the same.
        tls: TLS configuration of this side; None: no encryption.
        leaves_proof: the caller of :meth:`step` sends this side's proof (:meth:`unsent`) with its next data.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        secret: bytes,
        purpose: str,
        tls: Side | None = None,
        leaves_proof: bool = False,
    ) -> None:
        self._leaves_proof = leaves_proof
        self.stream = stream.open_stream(sock)
        self._tls = None if tls is None else tls.stream(self.stream)
        if self._tls is not None:
            self.stream = self._tls
        self._handshake = Handshake(connecting=False, secret=secret, purpose=purpose, tls=tls is not None)
        self._received = bytearray()
        self._unsent = bytearray(self._handshake.greeting)
        self._flush()

    @property
    def events(self) -> int:
        """The events to wait for: ``EVENT_WRITE`` while there are unsent bytes, else ``EVENT_READ``."""
        stuck = self._unsent or (self._tls is not None and self._tls.clogged)
        return selectors.EVENT_WRITE if stuck else selectors.EVENT_READ

    def unsent(self) -> bytes:
        """Return and remove the unsent bytes; the caller must send them before other data."""
        unsent = bytes(self._unsent)
        self._unsent.clear()
        return unsent

    def step(self) -> bool:
        """Continue the handshake without blocking or reading beyond it; return whether it has succeeded.

        Raises WireError if it failed or the other side closed, OSError if the connection is lost.
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
                self._unsent += handshake.bind(self._tls.certificate)
                continue
            view = memoryview(bytearray(handshake.needed - len(self._received)))
            try:
                count = self.stream.recv_into(view)
            except BlockingIOError:
                if self.stream.pending():
                    continue
                return False
            if not count:
                raise WireError("it closed the connection during the handshake")
            self._received += view[:count]
            if len(self._received) == handshake.needed:
                self._unsent += handshake.feed(self._received)
                self._received.clear()
                if handshake.done and self._leaves_proof:
                    return True
                if self._waits:
                    return False
        return False

    @property
    def _waits(self) -> bool:
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
