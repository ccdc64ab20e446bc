"""``Connection``: sends and receives messages as frames, with a deadline for every call."""

from __future__ import annotations

import contextlib
import select
import socket
from typing import TypeVar

import msgspec

from ..common.deadline import Deadline
from ..common.formatting import format_seconds
from ..errors import UsageError, WireError, WireTimeout
from .addresses import peer_name
from .frames import MAX_JOINED_BYTES, FrameReader, frame_header
from .stream import ByteStream, close_in_forked_child

H = TypeVar("H", bound=msgspec.Struct)

#: default maximum length of a message in bytes
DEFAULT_LIMIT = 2**20


class Connection:
    """Sends and receives whole messages.

    One thread may send while another receives; two threads must not do the same at once.

    Args:
        stream: of a connected socket; owned by the connection.
        limit: maximum length in bytes of a sent or received message.
        peer: name of the other side in messages; default: its address.
    """

    def __init__(self, stream: ByteStream, *, limit: int = DEFAULT_LIMIT, peer: str | None = None) -> None:
        self._stream = stream
        self._reader = FrameReader(limit)
        self._readable = select.poll()
        self._readable.register(stream, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(stream, select.POLLOUT)
        self.closed = False  #: whether this side has closed or detached the socket
        self.peer = peer if peer is not None else peer_name(stream.socket)
        close_in_forked_child(self)

    @property
    def limit(self) -> int:
        """Maximum length of a message in bytes."""
        return self._reader.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._reader.limit = limit

    @property
    def socket(self) -> socket.socket:
        """The socket, for operations other than frames; owned by the connection."""
        return self._stream.socket

    def send(self, message: bytes | bytearray | memoryview, timeout: float) -> None:
        """Send one message; return when the kernel has accepted all of it.

        Raises:
            UsageError: the message is longer than the limit; nothing was sent.
            WireTimeout: timed out.  Part of the message may have been sent, so the connection is closed.
            WireError: the connection is lost.
        """
        if len(message) > self.limit:
            raise UsageError(f"a message of {len(message)} bytes: at most {self.limit} fit in a frame")
        deadline = Deadline(timeout)
        header = frame_header(len(message))
        if len(message) <= MAX_JOINED_BYTES:
            self.write(header + message, deadline)
        else:
            self.write(header, deadline)
            self.write(message, deadline)

    def recv(self, timeout: float) -> bytes:
        """Return the next message.

        Raises:
            WireTimeout: no complete message arrived in time.  Call again to continue; no bytes are lost.
            WireError: the other side closed the connection, or sent a frame longer than the limit.
        """
        deadline = Deadline(timeout)
        ready = False
        while True:
            # The header has rarely arrived yet when a reply is awaited; the body nearly always has.
            if not ready:
                self._await(self._readable, deadline, "a message from")
            try:
                count = self._recv_into(self._reader.view())
            except BlockingIOError:
                ready = False
                continue
            message = self._reader.advance(count)
            if message is not None:
                return bytes(message)
            ready = True

    def write(self, data: bytes | bytearray | memoryview, deadline: Deadline) -> None:
        """Send bytes outside of frames."""
        view = memoryview(data).cast("B")
        while view:
            self._check_open()
            try:
                view = view[self._stream.send(view) :]
            except BlockingIOError:
                try:
                    self._await(self._writable, deadline, "room to send to")
                except WireTimeout:
                    self.close()
                    raise
            except OSError as error:
                raise self.lost_error(error) from error

    def read(self, count: int, deadline: Deadline) -> bytes:
        """Receive exactly ``count`` bytes outside of frames."""
        data = bytearray(count)
        view = memoryview(data)
        while view:
            self._await(self._readable, deadline, f"{len(view)} bytes from")
            with contextlib.suppress(BlockingIOError):
                view = view[self._recv_into(view) :]
        return bytes(data)

    def shutdown(self) -> None:
        """End the connection but keep the descriptor open; wakes threads that wait in it."""
        with contextlib.suppress(OSError):
            self._stream.shutdown()

    def close(self) -> None:
        """Close the socket.  If another thread may be using the connection, call :meth:`shutdown` first."""
        self.closed = True
        self._stream.close()

    def detach(self) -> int:
        """Detach the socket and return its descriptor, which is non-blocking and close-on-exec.

        Raises:
            WireError: part of a frame has already been read, or the connection is encrypted or closed.
        """
        self._check_open()
        if self._stream.pending() or not self._reader.between_frames:
            raise WireError(f"part of a frame from {self.peer} has been read: cannot hand the socket over")
        descriptor = self._stream.detach()
        self.closed = True
        return descriptor

    def release(self) -> ByteStream:
        """Detach the stream and return it; raises WireError like :meth:`detach`, but not for encryption."""
        self._check_open()
        if not self._reader.between_frames:
            raise WireError(f"part of a frame from {self.peer} has been read: cannot hand the stream over")
        self.closed = True
        return self._stream

    def fileno(self) -> int:
        """Return the descriptor, -1 when closed."""
        return self._stream.fileno()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Connection to {self.peer}{', closed' if self.closed else ''}>"

    def wait_readable(self, deadline: Deadline) -> None:
        """Block until data arrives or the other side closes; raise WireTimeout at the deadline."""
        self._await(self._readable, deadline, "data from")

    def wait_writable(self, deadline: Deadline) -> None:
        """Block until data can be sent; raise WireTimeout at the deadline."""
        self._await(self._writable, deadline, "room to send to")

    def _recv_into(self, view: memoryview) -> int:
        self._check_open()
        try:
            count = self._stream.recv_into(view)
        except BlockingIOError:
            raise
        except OSError as error:
            raise self.lost_error(error) from error
        if count == 0:
            where = "" if self._reader.between_frames else " in the middle of a message"
            raise WireError(f"{self.peer} closed the connection{where}") from ConnectionResetError(self.peer)
        return count

    def _await(self, poll: select.poll, deadline: Deadline, what: str) -> None:
        self._check_open()
        if poll is self._readable and self._stream.pending():
            return
        if not poll.poll(deadline.milliseconds()):
            raise WireTimeout(f"waited {format_seconds(deadline.timeout)} for {what} {self.peer}")

    def _check_open(self) -> None:
        if self.closed:
            raise WireError(f"the connection to {self.peer} is closed")

    def lost_error(self, error: OSError) -> WireError:
        """Return the error to raise because of ``error`` of the stream."""
        if isinstance(error, WireError):  # the stream (TLS) raised a more specific error
            return type(error)(f"{self.peer}: {error}")
        return WireError(f"lost the connection to {self.peer}: {error.strerror or error}")
