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

from collections import defaultdict
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


class _ChannelState:
    """The newest connection of a channel, by the order of authentication, and the channel's last write."""

    def __init__(self) -> None:
        self.connection = 0
        self.number = -1
        self.reply = b""


class StoredReplies:
    """The stored replies of all channels. It does no I/O.

    Args:
        writes: of an earlier run.
        now: the time at which the clients of ``writes`` count as disconnected.
    """

    def __init__(self, writes: Iterable[LastWrite] = (), now: float = 0.0) -> None:
        self._channels: defaultdict[bytes, _ChannelState] = defaultdict(_ChannelState)
        #: time of disconnection of each channel without a client, oldest first
        self._disconnected_at: dict[bytes, float] = {}
        for write in writes:
            self.store(write.name, write.number, write.reply)
            self.disconnected(write.name, 0, now)

    def stored_reply(
        self, name: bytes, connection: int, number: int, request: StoreRequest[object]
    ) -> bytes | bytearray | None:
        """Return the reply of a write that was executed already; None: execute it.

        Raises:
            WireError: the client has abandoned this connection for a newer one.
        """
        state = self._channels[name]
        self._disconnected_at.pop(name, None)
        if connection < state.connection or number < state.number:
            raise WireError("a write arrived on a connection that its client has abandoned")
        state.connection = connection
        if number != state.number:
            return None
        if state.reply:
            return state.reply
        # Only long replies of a CompareSet are not stored. The result is then the desired value.
        if not isinstance(request, CompareSet):
            raise WireError("a number was used again for another write")
        return encode_reply(Status.DONE, request.desired)

    def store(
        self, name: bytes, number: int, reply: bytes | bytearray, request: StoreRequest[object] | None = None
    ) -> None:
        """Store the reply of a write that changed something; ``request``: the write, if known."""
        state = self._channels[name]
        state.number = number
        is_known = isinstance(request, CompareSet) and len(reply) > _MAX_STORED_REPLY
        state.reply = b"" if is_known else bytes(reply)

    def last(self, name: bytes) -> LastWrite | None:
        """Return the stored write of a channel; None: there is none."""
        state = self._channels.get(name)
        return LastWrite(name, state.number, state.reply) if state is not None and state.number >= 0 else None

    def restore(self, name: bytes, write: LastWrite | None) -> None:
        """Make :meth:`last` return ``write`` again, because later writes were undone."""
        state = self._channels.get(name)
        if state is not None:
            state.number, state.reply = (-1, b"") if write is None else write[1:]

    def disconnected(self, name: bytes, connection: int, now: float) -> None:
        """Record the end of a connection; forget channels that had no client for ``CHANNEL_TTL_S``."""
        state = self._channels.get(name)
        if state is not None and state.connection == connection:
            self._disconnected_at.pop(name, None)
            self._disconnected_at[name] = now
        while self._disconnected_at and next(iter(self._disconnected_at.values())) <= now - CHANNEL_TTL_S:
            oldest = next(iter(self._disconnected_at))
            del self._disconnected_at[oldest], self._channels[oldest]

    def writes(self) -> list[LastWrite]:
        """Return all stored writes."""
        return [write for name in self._channels if (write := self.last(name)) is not None]

    def __len__(self) -> int:
        return len(self._channels)
