"""``ClientConnection``: the non-blocking connection of a server to one client."""

from __future__ import annotations

import selectors
from collections import deque

from ..errors import WireError
from .authentication import PendingHandshake
from .frames import MAX_JOINED_BYTES, FrameReader, frame_header, only_frame

#: maximum bytes read from one client at a time, so that a large message does not delay other clients
_MAX_READ_BYTES = 2**20


class ClientConnection:
    """The connection of a server to one client: reads and writes whole messages without blocking.

    Attributes:
        descriptor: of the stream; valid until the server drops the client.
        name: the client's address, for messages.
        closed: whether the server has dropped it.
        watched: the events that the server is waiting for.
    """

    def __init__(self, handshake: PendingHandshake, name: str, limit: int) -> None:
        self.stream = handshake.stream
        self.descriptor = self.stream.fileno()
        self.name = name
        self.authenticated = False
        self.closed = False
        self.watched = handshake.events
        #: None when it has succeeded
        self._handshake: PendingHandshake | None = handshake
        self._reader = FrameReader(limit)
        self._unsent: deque[memoryview] = deque()
        #: bytes that were read but not processed
        self._buffered = bytearray()

    @property
    def pending(self) -> bool:
        """Whether there are buffered bytes, which do not make the descriptor readable."""
        return bool(self._buffered) or self.stream.pending()

    @property
    def has_unsent(self) -> bool:
        """Whether there are unsent bytes."""
        return bool(self._unsent)

    @property
    def events(self) -> int:
        """The events to wait for: no message is read while there are unsent bytes."""
        if self._handshake is not None:
            return self._handshake.events
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    def continue_handshake(self) -> bool:
        """Continue the handshake; return whether it has now succeeded.  Raises like :meth:`receive`."""
        assert self._handshake is not None
        self.authenticated = self._handshake.step()
        if self.authenticated:
            if proof := self._handshake.take_unsent():
                self._unsent.append(memoryview(proof))
            self._handshake = None
        return self.authenticated

    def receive(self, short: memoryview) -> bytearray | None:
        """Read the bytes that have arrived; return a message if one is complete.

        Args:
            short: a buffer for short messages, used during this call.

        Raises:
            WireError: the client closed the connection, violated the protocol or failed to authenticate.
        """
        if not self._buffered and self._reader.between_frames:
            try:
                count = self.stream.recv_into(short)
            except BlockingIOError:
                return None
            if count == 0:
                raise WireError("the client closed the connection")
            message = only_frame(short[:count])
            if message is not None and len(message) <= self._reader.limit:
                return message
            self._buffered += short[:count]
        while self._buffered:
            view = self._reader.view()
            count = min(len(view), len(self._buffered))
            view[:count] = self._buffered[:count]
            del self._buffered[:count]
            message = self._reader.advance(count)
            if message is not None:
                return message
        taken = 0
        while True:
            view = self._reader.view()[:_MAX_READ_BYTES]
            try:
                count = self.stream.recv_into(view)
            except BlockingIOError:
                return None
            if count == 0:
                raise WireError("the client closed the connection")
            message = self._reader.advance(count)
            taken += count
            if message is not None or taken >= _MAX_READ_BYTES:
                return message

    def send(self, message: bytes | bytearray) -> None:
        """Send a message now, or later as the client receives it.  OSError: the connection is lost."""
        header = frame_header(len(message))
        if len(message) > MAX_JOINED_BYTES:
            self._write(header)
            self._write(message)
        elif self._unsent:
            self._write(header + message)
        else:  # the common case: one system call sends everything
            data = header + message
            try:
                sent = self.stream.send(data)
            except BlockingIOError:
                sent = 0
            if sent < len(data):
                self._unsent.append(memoryview(data)[sent:])

    def flush(self) -> None:
        """Send as many unsent bytes as possible now.  OSError: the connection is lost."""
        if len(self._unsent) > 1 and sum(map(len, self._unsent)) <= MAX_JOINED_BYTES:
            whole = b"".join(self._unsent)
            self._unsent.clear()
            self._unsent.append(memoryview(whole))
        while self._unsent:
            first = self._unsent[0]
            try:
                sent = self.stream.send(first)
            except BlockingIOError:
                return
            if sent < len(first):
                self._unsent[0] = first[sent:]
            else:
                self._unsent.popleft()

    def _write(self, data: bytes | bytearray) -> None:
        self._unsent.append(memoryview(data))
        if len(self._unsent) == 1:
            self.flush()
