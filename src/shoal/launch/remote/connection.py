"""The connection between a launcher and an agent: frames in both directions, without blocking.

It uses a *carrier*: two descriptors (a socket pair, or an agent's stdin and stdout), or an authenticated
connection of :mod:`shoal.net`.  A connection is used by one thread, in the loop of a selector.
"""

from __future__ import annotations

import os
import selectors
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from ...common.decoding import MalformedMessage, Raw
from ...errors import WireError
from ...net import ByteStream, FrameReader, frame_header
from ..agent_protocol import MAX_FRAME_BYTES, AgentFrame, encode

F = TypeVar("F")

_ENDED = "the connection has ended"
#: maximum number of frames to handle before the loop handles other events
_MAX_FRAMES_PER_TURN = 256
#: maximum number of bytes before the preamble, as written by a login shell before its command starts
_MAX_NOISE_BYTES = 1 << 16


class DescriptorCarrier:
    """A carrier that owns two descriptors, or one; its methods are those of :class:`shoal.net.ByteStream`.

    Attributes:
        reading, writing: the descriptors to wait for.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self.reading, self.writing = reading, writing
        for each in {reading, writing}:
            os.set_blocking(each, False)

    def recv_into(self, view: memoryview, /) -> int:
        return os.readv(self.reading, [view])

    def send(self, data: memoryview, /) -> int:
        return os.write(self.writing, data)

    def pending(self) -> bool:
        return False

    def close(self) -> None:
        for each in {self.reading, self.writing}:
            os.close(each)


class StreamCarrier:
    """A carrier that owns an authenticated stream of :mod:`shoal.net`."""

    def __init__(self, stream: ByteStream) -> None:
        self.reading = self.writing = stream.fileno()
        self.recv_into, self.send = stream.recv_into, stream.send
        self.pending, self.close = stream.pending, stream.close


Carrier = DescriptorCarrier | StreamCarrier


class AgentConnection(Generic[F]):
    """Sends frames, and calls a function for each received frame.

    Args:
        carrier: the byte stream, which this connection owns.
        decode: decodes a frame; raises MalformedMessage.
        received: called with each frame.
        lost: called once, with the reason, when the connection ends or a frame is malformed; not called by
            :meth:`close`.
        preamble: bytes before the first frame, which may follow noise.

    Attributes:
        noise: the last bytes before the preamble.
    """

    def __init__(
        self,
        carrier: Carrier,
        decode: Callable[[Raw], F],
        received: Callable[[F], None],
        lost: Callable[[str], None],
        *,
        preamble: bytes = b"",
    ) -> None:
        self._carrier = carrier
        self._decode = decode
        self._received, self._lost = received, lost
        self._preamble = preamble
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._now: memoryview = memoryview(b"")
        self._urgent: deque[bytes] = deque()
        self._bulk: deque[bytes] = deque()
        self._selector: selectors.BaseSelector | None = None
        self._listening: dict[int, int] = {}
        self.noise = bytearray()
        self.closed = False

    def watch(self, selector: selectors.BaseSelector | None) -> None:
        """Handle events in the loop of ``selector``, which calls the data of ready keys; None: in no loop."""
        for fd in self._listening:
            assert self._selector is not None
            self._selector.unregister(fd)
        self._listening.clear()
        self._selector = selector
        self._listen()

    def write(self, data: bytes) -> None:
        """Send bytes that are not a frame, such as a preamble."""
        self._urgent.append(data)
        self._flush()

    def send(self, frame: AgentFrame, *, bulk: bool = False) -> None:
        """Send a frame as soon as possible; frames that are not ``bulk`` overtake those that are."""
        if self.closed:
            return
        data = encode(frame)
        (self._bulk if bulk else self._urgent).append(frame_header(len(data)) + data)
        self._flush()

    def poll(self) -> None:
        """Handle received frames now, instead of in the loop."""
        if not self.closed:
            self._ready()

    @property
    def sent(self) -> bool:
        """Whether all frames were written to the carrier."""
        return not (self._now or self._urgent or self._bulk)

    def close(self) -> None:
        """Close the carrier; unsent frames are dropped."""
        if not self.closed:
            self.watch(None)
            self.closed = True
            self._carrier.close()

    # -- inside --------------------------------------------------------------------------------

    def _fail(self, why: str) -> None:
        if not self.closed:
            self.close()
            self._lost(why)

    def _listen(self) -> None:
        if self._selector is None or self.closed:
            return
        wanted = {self._carrier.reading: selectors.EVENT_READ}
        if not self.sent:
            writing = self._carrier.writing
            wanted[writing] = wanted.get(writing, 0) | selectors.EVENT_WRITE
        for fd in self._listening.keys() - wanted.keys():
            self._selector.unregister(fd)
        for fd, events in wanted.items():
            if fd not in self._listening:
                self._selector.register(fd, events, self._ready)
            elif self._listening[fd] != events:
                self._selector.modify(fd, events, self._ready)
        self._listening = wanted

    def _ready(self) -> None:
        if self.closed:
            return  # closed after the loop saw that it is ready
        self._flush()
        try:
            self._read()
        except BlockingIOError:
            pass
        except WireError as error:
            self._fail(str(error))
        except OSError as error:
            ended = isinstance(error, (ConnectionResetError, BrokenPipeError))
            self._fail(_ENDED if ended else f"{_ENDED}: {error.strerror or error}")

    def _flush(self) -> None:
        try:
            while not self.closed and not self.sent:
                if not self._now:
                    self._now = memoryview((self._urgent or self._bulk).popleft())
                self._now = self._now[self._carrier.send(self._now) :]
        except BlockingIOError:
            pass
        except OSError:
            # Frames that came before the connection ended are still read, and then its end.
            self._now = memoryview(b"")
            self._urgent.clear()
            self._bulk.clear()
        self._listen()

    def _read(self) -> None:
        for _ in range(_MAX_FRAMES_PER_TURN):
            if self._preamble:
                self._look_for_preamble()
            elif not self._read_frame():
                return
            if self.closed:
                return
        while self._carrier.pending() and not self.closed and self._read_frame():
            pass

    def _look_for_preamble(self) -> None:
        byte = bytearray(1)
        if self._carrier.recv_into(memoryview(byte)) == 0:
            raise WireError(_ENDED)
        self.noise += byte
        if self.noise.endswith(self._preamble):
            del self.noise[-len(self._preamble) :]
            self._preamble = b""
        elif len(self.noise) > _MAX_NOISE_BYTES:
            raise WireError("the program that answers is not an agent of shoal")

    def _read_frame(self) -> bool:
        """Read more bytes; return False if this connection is closed."""
        count = self._carrier.recv_into(self._reader.view())
        if count == 0:
            raise WireError(_ENDED)
        message = self._reader.advance(count)
        if message is not None:
            try:
                frame = self._decode(message)
            except MalformedMessage as error:
                raise WireError(f"it sent a malformed frame: {error}") from error
            self._received(frame)
        return not self.closed
