"""The protocol between client and server of a TCP store: messages of msgpack in frames.

The server speaks first, after the handshake: a :class:`Welcome` says whose data it holds.  Then a client
sends one request and waits for its reply before it sends the next.  A reply is one byte that says how it
went, and a body whose type follows from that byte and the request.

A request that may change something has a number before it, so that it is done once however often it is
sent: see ``replies.py``.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from ...common.decoding import MalformedMessage, Raw, msgpack_decoder
from ...errors import StoreError, WireError
from ..base import timed_out
from ..operations import MAX_VALUE
from ..requests import RESULTS, StoreRequest, decode, encode, encode_into

T = TypeVar("T")

#: purpose of the handshake
PURPOSE = "store"

#: longest message in bytes: one value of the greatest size, or 64 MB of small ones, and the keys
MAX_MESSAGE = MAX_VALUE + 4 * 2**20


class Status(enum.IntEnum):
    """The first byte of a reply; it tells the type of the rest."""

    DONE = 0  #: the result
    MISSING = 1  #: list of the keys that did not appear in time
    FAILED = 2  #: text of a StoreError


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """What a server says of itself to each client.

    Attributes:
        state: names the data: a server that begins with nothing gives it another name.
        durable: the data outlives the server, which may come again.
    """

    state: bytes
    durable: bool = False


class Numbered(NamedTuple):
    """A request as it came, with the number of a write.

    Attributes:
        line: names the client's line, 16 random bytes; b"" of a request that changes nothing.
        number: of the request on that line; each is greater than the one before.
    """

    request: StoreRequest[Any]
    line: bytes = b""
    number: int = 0


#: before a write: a byte that begins no request, the line, and the number
_NUMBER = struct.Struct("<B16sQ")
_WRITE = 1

#: longest :class:`Welcome` in bytes
MAX_WELCOME = 64

_welcome: Callable[[Raw], Welcome] = msgpack_decoder(Welcome)
_encoder = msgspec.msgpack.Encoder()
_results = {request: msgpack_decoder(result) for request, result in RESULTS.items()}
_keys = msgpack_decoder(list[str])
_text = msgpack_decoder(str)


def encode_request(request: StoreRequest[Any], line: bytes = bytes(16), number: int = 0) -> bytes | bytearray:
    """The message that carries ``request``, a write with its number.

    Raises:
        StoreError: its keys are too long for any message.
    """
    message: bytes | bytearray
    if request.writes:
        message = bytearray(_NUMBER.size)
        _NUMBER.pack_into(message, 0, _WRITE, line, number)
        encode_into(request, message, _NUMBER.size)
    else:
        message = encode(request)
    if len(message) > MAX_MESSAGE:
        raise StoreError(
            f"a request of {len(message)} bytes, at most {MAX_MESSAGE} fit: too many keys at once"
        )
    return message


def decode_request(message: bytes | bytearray) -> Numbered:
    """The request that a message carries.  WireError: it carries none, or a write without its number."""
    try:
        if not message or message[0] != _WRITE:
            request = decode(message)
            if request.writes:
                raise WireError("a write came without its number")
            return Numbered(request)
        _, line, number = _NUMBER.unpack_from(message)
        request = decode(memoryview(message)[_NUMBER.size :])
    except (MalformedMessage, struct.error) as error:
        raise WireError(str(error)) from error
    if not request.writes:
        raise WireError("a request that changes nothing came with a number")
    return Numbered(request, line, number)


def decode_welcome(message: bytes) -> Welcome:
    """The first message of a server.  WireError: it is none."""
    try:
        return _welcome(message)
    except MalformedMessage as error:
        raise WireError(f"the server did not say what it is: {error}") from error


def encode_reply(status: Status, body: object) -> bytearray:
    """The message that carries a reply."""
    message = bytearray((status,))
    _encoder.encode_into(body, message, 1)
    if len(message) > MAX_MESSAGE:
        return encode_reply(Status.FAILED, f"a reply of {len(message)} bytes: at most {MAX_MESSAGE} fit")
    return message


def decode_reply(request: StoreRequest[T], message: bytes, timeout: float) -> T:
    """The result of ``request``.

    Raises:
        StoreTimeout: keys were missing for ``timeout`` seconds.
        StoreError: the server could not do it.
        MalformedMessage, ValueError, IndexError: the message is no reply to this request.
    """
    status, body = Status(message[0]), memoryview(message)[1:]
    if status is Status.MISSING:
        raise timed_out(_keys(body), timeout)
    if status is Status.FAILED:
        raise StoreError(_text(body))
    return cast(T, _results[type(request)](body))
