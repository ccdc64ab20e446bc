"""What a server remembers of each client's last write, so that it is done once however often it is sent.

A client sends its requests on *lines*.  A line carries one request at a time, has a random name, and numbers
its writes.  When a connection is lost before the reply came, the client opens another one for the line and
sends the write again, under its number:

- a number whose write has changed something gets the reply that it got before;
- another one is executed.  What it did the first time, if anything, was to look.

An older connection of the line may still hold a copy that the server has not read: nothing is taken from it
once a newer one has been heard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ...errors import WireError
from ..requests import CompareSet, StoreRequest
from .protocol import Status, encode_reply

#: seconds for which a line is remembered after its client has gone
REMEMBERED = 600.0

#: longest reply in bytes of a CompareSet that is kept; other writes have shorter ones
_LONGEST = 64 * 2**10


class LastWrite(NamedTuple):
    """The last write of a line that changed something, and its reply; b"": too long to be kept."""

    name: bytes
    number: int
    reply: bytes


class _Heard:
    """Of one line: the newest connection, by its place in the order of their making, and the last write."""

    __slots__ = ("connection", "number", "reply")

    def __init__(self) -> None:
        self.connection = 0
        self.number = -1
        self.reply = b""


class Replies:
    """The kept replies of all lines.  It does no I/O.

    Args:
        lines: from before.
        now: their clients have gone, as far as is known, at this moment.
    """

    def __init__(self, lines: Iterable[LastWrite] = (), now: float = 0.0) -> None:
        self._lines: dict[bytes, _Heard] = {}
        #: since when there is no client, the one that went first at the front
        self._gone: dict[bytes, float] = {}
        for line in lines:
            self.keep(line.name, line.number, line.reply)
            self.gone(line.name, 0, now)

    def repeated(
        self, name: bytes, connection: int, number: int, request: StoreRequest[object]
    ) -> bytes | bytearray | None:
        """The reply of a write that was done already; None: it is to be done.

        Raises:
            WireError: the client has given up this connection, and what comes on it.
        """
        heard = self._lines.get(name)
        if heard is None:
            heard = self._lines[name] = _Heard()
        self._gone.pop(name, None)
        if connection < heard.connection or number < heard.number:
            raise WireError("a write came on a connection that its client has given up")
        heard.connection = connection
        if number != heard.number:
            return None
        if heard.reply:
            return heard.reply
        # Only long replies of a CompareSet are not kept.  Its result is then the value that it has set.
        if not isinstance(request, CompareSet):
            raise WireError("a number came again with another write")
        return encode_reply(Status.DONE, request.desired)

    def keep(
        self, name: bytes, number: int, reply: bytes | bytearray, request: StoreRequest[object] | None = None
    ) -> None:
        """Note the reply of a write that changed something; ``request``: which one, if it is known."""
        heard = self._lines.get(name)
        if heard is None:
            heard = self._lines[name] = _Heard()
        heard.number = number
        is_known = isinstance(request, CompareSet) and len(reply) > _LONGEST
        heard.reply = b"" if is_known else bytes(reply)

    def last(self, name: bytes) -> LastWrite | None:
        """What is kept of a line; None: nothing."""
        heard = self._lines.get(name)
        return LastWrite(name, heard.number, heard.reply) if heard is not None and heard.number >= 0 else None

    def restore(self, name: bytes, line: LastWrite | None) -> None:
        """Let :meth:`last` return ``line`` again: what was done since was undone."""
        heard = self._lines.get(name)
        if heard is not None:
            heard.number, heard.reply = (-1, b"") if line is None else line[1:]

    def gone(self, name: bytes, connection: int, now: float) -> None:
        """A connection of the line has ended; forget those lines whose clients went long ago."""
        heard = self._lines.get(name)
        if heard is not None and heard.connection == connection:
            self._gone.pop(name, None)
            self._gone[name] = now
        while self._gone and next(iter(self._gone.values())) <= now - REMEMBERED:
            oldest = next(iter(self._gone))
            del self._gone[oldest], self._lines[oldest]

    def lines(self) -> list[LastWrite]:
        """All that is kept."""
        return [
            LastWrite(name, each.number, each.reply) for name, each in self._lines.items() if each.number >= 0
        ]

    def __len__(self) -> int:
        return len(self._lines)
