"""Non-blocking byte streams, the layer below the handshake and the frames.

:func:`open_stream` makes one for a connected socket; an encrypted one (``tls/stream.py``) wraps another.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from .inherit import close_in_forked_child


class ByteStream(Protocol):
    """A non-blocking byte stream."""

    def recv_into(self, view: memoryview, /) -> int:
        """Receive into ``view``; return the number of bytes, 0 when the other side has closed.

        Raises:
            BlockingIOError: nothing has arrived.  OSError: the connection is lost.
        """

    def send(self, data: bytes | bytearray | memoryview, /) -> int:
        """Send the first bytes of ``data``; return their number.  Raises like :meth:`recv_into`.

        After a BlockingIOError the next ``data`` must begin with the same bytes: an encrypted stream may have
        begun to send them.
        """

    def pending(self) -> bool:
        """Whether :meth:`recv_into` has buffered bytes, which do not make the descriptor readable."""

    def fileno(self) -> int:
        """Return the descriptor to wait for, -1 when closed."""

    def detach(self) -> int:
        """Detach the descriptor and return it.  WireError: the stream is encrypted."""

    def shutdown(self) -> None:
        """End the stream but keep the descriptor open.  OSError: the connection is lost."""

    def close(self) -> None:
        """Close the descriptor.  May be called twice."""

    @property
    def socket(self) -> socket.socket:
        """The underlying socket."""


class SocketStream:
    """The unencrypted stream of a socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        close_in_forked_child(sock)
        self.socket = sock
        # The bound methods themselves, without a wrapper: they determine a store's round-trip time.
        self.recv_into: Callable[[memoryview], int] = sock.recv_into
        self.send: Callable[[bytes | bytearray | memoryview], int] = sock.send
        self.fileno = sock.fileno
        self.detach = sock.detach
        self.close = sock.close

    def pending(self) -> bool:
        return False

    def shutdown(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)


def open_stream(sock: socket.socket) -> ByteStream:
    """Return a stream that owns the connected socket and makes it non-blocking."""
    return SocketStream(sock)
