"""Cutting a stream of bytes into frames, without doing any I/O."""

from __future__ import annotations

import struct

from ..errors import WireError

_LENGTH = struct.Struct("<I")

#: up to this size header and message are joined, which is cheaper than a second system call
JOIN = 2**14


def frame_header(length: int) -> bytes:
    """The 4 bytes that come before a message of ``length`` bytes."""
    return _LENGTH.pack(length)


def only_frame(data: memoryview) -> bytearray | None:
    """The message of the one frame that ``data`` is; None: it is more than that, or less."""
    if len(data) <= _LENGTH.size or _LENGTH.unpack_from(data)[0] != len(data) - _LENGTH.size:
        return None
    return bytearray(data[_LENGTH.size :])


class FrameReader:
    """Collects one frame after the other.

    Fill :meth:`view` from the socket, tell :meth:`advance` how many bytes came.  The view never
    reaches beyond the current frame, so a connection can be handed over between two frames with
    nothing lost in a buffer.

    Args:
        limit: longest message in bytes that is accepted.
    """

    __slots__ = ("_filled", "_in_body", "_target", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._target = bytearray(_LENGTH.size)
        self._filled = 0
        self._in_body = False

    @property
    def between_frames(self) -> bool:
        """Whether nothing of a frame has arrived yet."""
        return not self._in_body and self._filled == 0

    def view(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        return memoryview(self._target)[self._filled :]

    def advance(self, count: int) -> bytearray | None:
        """Take note of ``count`` bytes in the view; the message, when they complete it.

        Raises:
            WireError: the frame is longer than the limit.  Nothing was allocated for it.
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
