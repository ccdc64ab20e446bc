"""Decoding with msgspec where several threads may be the first to decode a type.

What msgspec knows of a ``Struct`` it finds out when that is first decoded, and other threads may see it half
done: they end the process by SIGSEGV (msgspec 0.22; ``tests/test_decoding.py`` has the scene).  So decoders
are made one at a time here, and used when they are whole.  A decoder that a module makes for itself when it
is imported is as good.
"""

from __future__ import annotations

import os
import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_making = threading.Lock()
_decoders: dict[tuple[type, object, bool], Any] = {}


def from_msgpack(raw: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """What ``raw`` holds; raises as :func:`msgspec.msgpack.decode`."""
    value: T = _decoder(msgspec.msgpack.Decoder, kind).decode(raw)
    return value


def from_json(raw: bytes | bytearray | memoryview, kind: type[T], *, strict: bool = True) -> T:
    """What ``raw`` holds; raises as :func:`msgspec.json.decode`."""
    value: T = _decoder(msgspec.json.Decoder, kind, strict).decode(raw)
    return value


def converted(value: object, kind: type[T]) -> T:
    """``value`` as a ``kind``; raises as :func:`msgspec.convert`."""
    _decoder(msgspec.msgpack.Decoder, kind)
    return msgspec.convert(value, kind)


def _decoder(maker: Any, kind: Any, strict: bool = True) -> Any:
    key = maker, kind, strict
    if (found := _decoders.get(key)) is None:
        with _making:
            if (found := _decoders.get(key)) is None:
                found = _decoders[key] = maker(kind, strict=strict)
    return found


def _after_fork_in_child() -> None:
    global _making
    _making = threading.Lock()  # a thread that the child does not have may have held it


os.register_at_fork(after_in_child=_after_fork_in_child)
