"""Streams: the bytes of a connection, below the handshake and the frames.  A stream never blocks.

This package reads and writes through a :class:`ByteStream`, which :func:`open_stream` makes of a connected
socket.  One that encrypts (``tls/stream.py``) uses such a stream.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from .inherit import close_in_forked_child


class ByteStream(Protocol):
    """A byte stream that is never waited for."""

    def recv_into(self, view: memoryview, /) -> int:
        """Receive into ``view``: how many bytes came, 0 when the other side has closed.

        Raises:
            BlockingIOError: nothing has arrived.  OSError: the other side is gone.
        """

    def send(self, data: bytes | bytearray | memoryview, /) -> int:
        """Send the first bytes of ``data``: how many.  BlockingIOError and OSError as above.

        After a BlockingIOError ``data`` must begin with the same bytes again: a stream that encrypts may have
        begun to send them.
        """

    def pending(self) -> bool:
        """Whether :meth:`recv_into` has bytes of which the descriptor knows nothing, as it gave them up."""

    def fileno(self) -> int:
        """The descriptor to wait for, -1 when closed."""

    def detach(self) -> int:
        """Give up the descriptor and return it.  WireError: the stream is more than its descriptor."""

    def shutdown(self) -> None:
        """End the stream without giving up the descriptor.  OSError if it is gone."""

    def close(self) -> None:
        """Close the descriptor.  May be called twice."""

    @property
    def socket(self) -> socket.socket:
        """The socket below."""


class SocketStream:
    """A socket as it is."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        close_in_forked_child(sock)
        self.socket = sock
        # No call in between: a store's round trip is made of these.
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
    """The stream of a connected socket, which owns it from now on and makes it non-blocking."""
    return SocketStream(sock)
