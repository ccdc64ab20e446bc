"""The protocol between client and server of a TCP store: messages of msgpack in frames.

A client sends one request and waits for its reply before it sends the next.  A reply is one byte
that says how it went, and a body whose type follows from that byte and the request.
"""

from __future__ import annotations

import enum
from typing import Any, TypeVar, cast

import msgspec

from ..errors import StoreError
from .base import timed_out
from .operations import MAX_VALUE
from .requests import RESULTS, Request, encode

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


_encoder = msgspec.msgpack.Encoder()
_results = {request: msgspec.msgpack.Decoder(result) for request, result in RESULTS.items()}
_keys = msgspec.msgpack.Decoder(list[str])
_text = msgspec.msgpack.Decoder(str)


def encode_request(request: Request[Any]) -> bytes:
    """The message that carries ``request``.  StoreError if its keys are too long for any message."""
    message = encode(request)
    if len(message) > MAX_MESSAGE:
        raise StoreError(
            f"a request of {len(message)} bytes, at most {MAX_MESSAGE} fit: too many keys at once"
        )
    return message


def encode_reply(status: Status, body: object) -> bytearray:
    """The message that carries a reply."""
    message = bytearray((status,))
    _encoder.encode_into(body, message, 1)
    if len(message) > MAX_MESSAGE:
        return encode_reply(Status.FAILED, f"a reply of {len(message)} bytes: at most {MAX_MESSAGE} fit")
    return message


def decode_reply(request: Request[T], message: bytes, timeout: float) -> T:
    """The result of ``request``.

    Raises:
        StoreTimeout: keys were missing for ``timeout`` seconds.
        StoreError: the server could not do it.
        msgspec.DecodeError, ValueError: the message is no reply to this request.
    """
    status, body = Status(message[0]), memoryview(message)[1:]
    if status is Status.MISSING:
        raise timed_out(_keys.decode(body), timeout)
    if status is Status.FAILED:
        raise StoreError(_text.decode(body))
    return cast(T, _results[type(request)].decode(body))
