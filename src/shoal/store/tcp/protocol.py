"""The protocol between client and server of a TCP store: msgpack messages in frames.

After the handshake the server sends a :class:`Welcome`, which identifies its data. Then a client sends one
request and waits for its reply before it sends the next. A reply is a status byte, and a body whose type
depends on the status and the request.

A request that can change something is preceded by a number, so that it is executed once however often it is
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
from ..requests import MAX_VALUE, RESULTS, StoreRequest, decode, encode, encode_into

T = TypeVar("T")

#: purpose of the handshake
PURPOSE = "store"

#: longest message in bytes: one value of maximum length, or 64 MB of small ones, and the keys
MAX_MESSAGE = MAX_VALUE + 4 * 2**20


class Status(enum.IntEnum):
    """The first byte of a reply, which determines the type of the rest."""

    DONE = 0  #: the result
    MISSING = 1  #: list of the keys that did not appear in time
    FAILED = 2  #: text of a StoreError


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The first message of a server to each client.

    Attributes:
        state: identity of the data; a server that starts empty chooses another one.
        durable: the data survives the server, which may restart.
    """

    state: bytes
    durable: bool = False


class Numbered(NamedTuple):
    """A received request, with the number of a write.

    Attributes:
        channel: name of the client's write channel, 16 random bytes; b"" for a request that changes nothing.
        number: of the request on that channel, greater than all earlier ones.
    """

    request: StoreRequest[Any]
    channel: bytes = b""
    number: int = 0


#: precedes a write: a byte that begins no request, the name of the channel, and the number
_NUMBER = struct.Struct("<B16sQ")
_WRITE = 1

#: longest :class:`Welcome` in bytes
MAX_WELCOME = 64

_welcome: Callable[[Raw], Welcome] = msgpack_decoder(Welcome)
_encoder = msgspec.msgpack.Encoder()
_results = {request: msgpack_decoder(result) for request, result in RESULTS.items()}
_keys = msgpack_decoder(list[str])
_text = msgpack_decoder(str)


def encode_request(
    request: StoreRequest[Any], channel: bytes = bytes(16), number: int = 0
) -> bytes | bytearray:
    """Return the message that carries ``request`` (a write: with its number). StoreError: it is too long."""
    message: bytes | bytearray
    if request.writes:
        message = bytearray(_NUMBER.size)
        _NUMBER.pack_into(message, 0, _WRITE, channel, number)
        encode_into(request, message, _NUMBER.size)
    else:
        message = encode(request)
    if len(message) > MAX_MESSAGE:
        raise StoreError(
            f"a request of {len(message)} bytes exceeds the limit of {MAX_MESSAGE}: pass fewer keys at once"
        )
    return message


def decode_request(message: bytes | bytearray) -> Numbered:
    """Return the request that a message carries. WireError: there is none, or a write has no number."""
    try:
        if not message or message[0] != _WRITE:
            request = decode(message)
            if request.writes:
                raise WireError("a write came without its number")
            return Numbered(request)
        _, channel, number = _NUMBER.unpack_from(message)
        request = decode(memoryview(message)[_NUMBER.size :])
    except (MalformedMessage, struct.error) as error:
        raise WireError(str(error)) from error
    if not request.writes:
        raise WireError("a request that changes nothing came with a number")
    return Numbered(request, channel, number)


def decode_welcome(message: bytes) -> Welcome:
    """Return the first message of a server. WireError: it is malformed."""
    try:
        return _welcome(message)
    except MalformedMessage as error:
        raise WireError(f"the server's welcome message cannot be decoded: {error}") from error


def encode_reply(status: Status, body: object) -> bytearray:
    """Return the message that carries a reply."""
    message = bytearray((status,))
    _encoder.encode_into(body, message, 1)
    if len(message) > MAX_MESSAGE:
        return encode_reply(Status.FAILED, f"a reply of {len(message)} bytes: at most {MAX_MESSAGE} fit")
    return message


def decode_reply(request: StoreRequest[T], message: bytes, timeout: float) -> T:
    """Return the result of ``request``.

    Raises:
        StoreTimeout: keys were missing for ``timeout`` seconds.
        StoreError: the server could not execute the request.
        MalformedMessage, ValueError, IndexError: the message is not a reply to this request.
    """
    status, body = Status(message[0]), memoryview(message)[1:]
    if status is Status.MISSING:
        raise timed_out(_keys(body), timeout)
    if status is Status.FAILED:
        raise StoreError(_text(body))
    return cast(T, _results[type(request)](body))
