"""One client of a TCP store as its server sees it: non-blocking I/O, no meaning."""

from __future__ import annotations

import socket
from collections import deque

from ..errors import WireError
from ..wire import FrameReader, Handshake, frame_header
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

    def __init__(self, sock: socket.socket, name: str, handshake: Handshake, limit: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.name = name
        self.authenticated = False
        self.parked: Blocking[object] | None = None
        self.closed = False
        self._handshake = handshake
        self._step = bytearray()
        self._reader = FrameReader(limit)
        self._unsent: deque[memoryview] = deque()
        self._write(handshake.greeting)

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
            self._shake()
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

    def _shake(self) -> None:
        """Take the next step of the handshake, never reading beyond it."""
        handshake = self._handshake
        try:
            data = self.sock.recv(handshake.needed - len(self._step))
        except BlockingIOError:
            return
        if not data:
            raise WireError("the client left in the middle of the handshake")
        self._step += data
        if len(self._step) < handshake.needed:
            return
        reply = handshake.feed(self._step)
        self._step.clear()
        if reply:
            self._write(reply)
        if handshake.failure is not None:
            raise handshake.failure
        self.authenticated = handshake.done
