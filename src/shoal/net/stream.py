"""Non-blocking byte streams, the layer below the handshake and the frames.

An encrypted stream (``tls/stream.py``) wraps that of a socket.

A forked child closes inherited sockets. Otherwise the workers of a DataLoader would keep the connections of
their parent open after it has ended, and its peers would not detect that.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet


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
    """The unencrypted stream of a connected socket, which it owns and makes non-blocking."""

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


class _Closable(Protocol):
    def close(self) -> None: ...


_inherited: WeakSet[_Closable] = WeakSet()


def close_in_forked_child(resource: _Closable) -> None:
    """Call ``resource.close()`` in every child that this process forks while ``resource`` exists.

    ``close`` must only close the child's copy of a descriptor, and may be called twice.
    """
    _inherited.add(resource)


def _after_fork() -> None:
    for resource in list(_inherited):
        resource.close()
    _inherited.clear()


os.register_at_fork(after_in_child=_after_fork)
