"""One client of a TCP store as its server sees it: non-blocking I/O, no meaning."""

from __future__ import annotations

import socket
from collections import deque

from ..errors import WireError
from ..wire import FrameReader, PendingHandshake, frame_header
from .requests import Blocking

#: most bytes taken from one client at a time, so that a large value does not hold up the others
_SLICE = 2**20

#: below this size header and message are joined, which is cheaper than a second system call
_JOIN = 2**14


class Session:
    """Reads whole messages from a client and writes replies to it, without ever blocking.

    Attributes:
        sock: the client's socket.
        name: its address, for messages.
        authenticated: whether its handshake has succeeded.
        parked: the request that waits for its keys, if one does.
        closed: whether the server has dropped the client.
    """

    def __init__(self, handshake: PendingHandshake, name: str, limit: int) -> None:
        self.sock: socket.socket = handshake.sock
        self.name = name
        self.authenticated = False
        self.parked: Blocking[object] | None = None
        self.closed = False
        self._handshake = handshake
        self._reader = FrameReader(limit)
        self._unsent: deque[memoryview] = deque()

    @property
    def clogged(self) -> bool:
        """Whether there are bytes that the client has not taken yet."""
        return bool(self._unsent)

    def receive(self) -> bytearray | None:
        """Read what is there; a message when one is complete.

        Raises:
            WireError: the client left, broke the protocol or failed to authenticate.
        """
        if not self.authenticated:
            self.authenticated = self._handshake.step()
            return None
        while True:
            view = self._reader.view()[:_SLICE]
            try:
                count = self.sock.recv_into(view)
            except BlockingIOError:
                return None
            if count == 0:
                raise WireError("the client closed the connection")
            if self.parked is not None:
                raise WireError("the client sent a request before the last one was answered")
            message = self._reader.advance(count)
            if message is not None or count == _SLICE:
                return message

    def reply(self, message: bytes | bytearray) -> None:
        """Send a message, now or when the client takes it.  OSError if it is gone."""
        header = frame_header(len(message))
        if len(message) <= _JOIN:
            self._write(header + message)
        else:
            self._write(header)
            self._write(message)

    def flush(self) -> None:
        """Send what can be sent now.  OSError if the client is gone."""
        while self._unsent:
            first = self._unsent[0]
            try:
                sent = self.sock.send(first)
            except BlockingIOError:
                return
            if sent < len(first):
                self._unsent[0] = first[sent:]
                return
            self._unsent.popleft()

    def _write(self, data: bytes | bytearray) -> None:
        self._unsent.append(memoryview(data))
        if len(self._unsent) == 1:
            self.flush()
