"""Splitting a byte stream into frames, without I/O."""

from __future__ import annotations

import struct

from ..errors import WireError

_LENGTH = struct.Struct("<I")

#: bytes; up to this size header and message are joined, which is cheaper than a second system call
MAX_JOINED_BYTES = 2**14


def frame_header(length: int) -> bytes:
    """Return the 4 bytes that precede a message of ``length`` bytes."""
    return _LENGTH.pack(length)


def only_frame(data: memoryview) -> bytearray | None:
    """Return the message if ``data`` is exactly one frame, else None."""
    if len(data) <= _LENGTH.size or _LENGTH.unpack_from(data)[0] != len(data) - _LENGTH.size:
        return None
    return bytearray(data[_LENGTH.size :])


class FrameReader:
    """Reads one frame after the other.

    Fill :meth:`view` from the socket and pass the number of bytes to :meth:`advance`.  The view never extends
    beyond the current frame, so no bytes are lost when a connection is detached between two frames.

    Args:
        limit: maximum length of an accepted message in bytes.
    """

    __slots__ = ("_filled", "_in_body", "_target", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._target = bytearray(_LENGTH.size)
        self._filled = 0
        self._in_body = False

    @property
    def between_frames(self) -> bool:
        """Whether no byte of the next frame has arrived yet."""
        return not self._in_body and self._filled == 0

    def view(self) -> memoryview:
        """Return the buffer for the next bytes; never empty."""
        return memoryview(self._target)[self._filled :]

    def advance(self, count: int) -> bytearray | None:
        """Note that ``count`` bytes were written to the view; return the message if it is complete.

        Raises WireError, before memory is allocated, if the frame is longer than the limit.
        """
        self._filled += count
        if self._filled < len(self._target):
            return None
        if self._in_body:
            return self._finish()
        (length,) = _LENGTH.unpack(self._target)
        if length > self.limit:
            raise WireError(f"a frame of {length} bytes came, at most {self.limit} are accepted")
        self._target = bytearray(length)
        self._filled = 0
        self._in_body = True
        return None if length else self._finish()

    def _finish(self) -> bytearray:
        message = self._target
        self._target = bytearray(_LENGTH.size)
        self._filled = 0
        self._in_body = False
        return message
