"""The last write of each write channel, which a server stores so that no write is executed twice.

A client sends its requests on *write channels*. A channel carries one request at a time, has a random name,
and numbers its writes. If a connection is lost before the reply, the client opens another one for the channel
and sends the write again with its number:

- if the write has changed something, the server returns the stored reply;
- otherwise the server executes it, for the first time or after an attempt that changed nothing.

An older connection of the channel may still contain a copy that the server has not read: writes on it are
refused once a newer connection has been used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ...errors import WireError
from ..requests import CompareSet, StoreRequest
from .protocol import Status, encode_reply

#: seconds for which a channel is stored after its client has disconnected
CHANNEL_TTL_S = 600.0

#: longest reply in bytes of a CompareSet that is stored; other writes have shorter replies
_MAX_STORED_REPLY = 64 * 2**10


class LastWrite(NamedTuple):
    """The last write of a channel that changed something, and its reply; b"": too long to be stored."""

    name: bytes
    number: int
    reply: bytes


class _Heard:
    """The newest connection of a channel, by the order of their creation, and the channel's last write."""

    __slots__ = ("connection", "number", "reply")

    def __init__(self) -> None:
        self.connection = 0
        self.number = -1
        self.reply = b""


class Replies:
    """The stored replies of all channels. It does no I/O.

    Args:
        lines: writes from an earlier run.
        now: the time at which the clients of ``lines`` count as disconnected.
    """

    def __init__(self, lines: Iterable[LastWrite] = (), now: float = 0.0) -> None:
        self._lines: dict[bytes, _Heard] = {}
        #: time of disconnection of each channel without a client, oldest first
        self._gone: dict[bytes, float] = {}
        for line in lines:
            self.keep(line.name, line.number, line.reply)
            self.gone(line.name, 0, now)

    def repeated(
        self, name: bytes, connection: int, number: int, request: StoreRequest[object]
    ) -> bytes | bytearray | None:
        """Return the reply of a write that was executed already; None: execute it.

        Raises:
            WireError: the client has abandoned this connection for a newer one.
        """
        heard = self._lines.get(name)
        if heard is None:
            heard = self._lines[name] = _Heard()
        self._gone.pop(name, None)
        if connection < heard.connection or number < heard.number:
            raise WireError("a write arrived on a connection that its client has abandoned")
        heard.connection = connection
        if number != heard.number:
            return None
        if heard.reply:
            return heard.reply
        # Only long replies of a CompareSet are not stored. The result is then the desired value.
        if not isinstance(request, CompareSet):
            raise WireError("a number was used again for another write")
        return encode_reply(Status.DONE, request.desired)

    def keep(
        self, name: bytes, number: int, reply: bytes | bytearray, request: StoreRequest[object] | None = None
    ) -> None:
        """Store the reply of a write that changed something; ``request``: the write, if known."""
        heard = self._lines.get(name)
        if heard is None:
            heard = self._lines[name] = _Heard()
        heard.number = number
        is_known = isinstance(request, CompareSet) and len(reply) > _MAX_STORED_REPLY
        heard.reply = b"" if is_known else bytes(reply)

    def last(self, name: bytes) -> LastWrite | None:
        """Return the stored write of a channel; None: there is none."""
        heard = self._lines.get(name)
        return LastWrite(name, heard.number, heard.reply) if heard is not None and heard.number >= 0 else None

    def restore(self, name: bytes, line: LastWrite | None) -> None:
        """Make :meth:`last` return ``line`` again, because later writes were undone."""
        heard = self._lines.get(name)
        if heard is not None:
            heard.number, heard.reply = (-1, b"") if line is None else line[1:]

    def gone(self, name: bytes, connection: int, now: float) -> None:
        """Record the end of a connection; forget channels that had no client for ``CHANNEL_TTL_S``."""
        heard = self._lines.get(name)
        if heard is not None and heard.connection == connection:
            self._gone.pop(name, None)
            self._gone[name] = now
        while self._gone and next(iter(self._gone.values())) <= now - CHANNEL_TTL_S:
            oldest = next(iter(self._gone))
            del self._gone[oldest], self._lines[oldest]

    def lines(self) -> list[LastWrite]:
        """Return all stored writes."""
        return [
            LastWrite(name, each.number, each.reply) for name, each in self._lines.items() if each.number >= 0
        ]

    def __len__(self) -> int:
        return len(self._lines)
