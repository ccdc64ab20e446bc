"""Decoding of messages: the only module that decodes with msgspec.

Two properties of msgspec (0.22) require a common module:

- A malformed message raises ``MsgspecError``, ``UnicodeDecodeError`` or, if it is nested too deeply,
  ``RecursionError``.  Here it raises :class:`MalformedMessage`.
- The first use of a ``Struct`` builds its type information, and another thread that uses it before it is
  complete crashes with SIGSEGV (``tests/common/test_decoding.py`` reproduces it).  Here decoders are made one
  at a time, and used when they are complete.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")
Raw: TypeAlias = bytes | bytearray | memoryview

_making = threading.Lock()
_decoders: dict[tuple[type, object, bool], Any] = {}


class MalformedMessage(ValueError):
    """Raised for bytes or values of an unexpected form; the text names the fault and its place."""


def from_msgpack(raw: Raw, kind: type[T]) -> T:
    """Decode msgpack; raise MalformedMessage if ``raw`` is not a ``kind``."""
    value: T = _checked(_decoder(msgspec.msgpack.Decoder, kind).decode, raw)
    return value


def msgpack_decoder(
    kind: Any, *, ext_hook: Callable[[int, memoryview], Any] | None = None
) -> Callable[[Raw], Any]:
    """Return a function that decodes msgpack to ``kind`` and raises MalformedMessage.

    Args:
        kind: the expected type or union of types.
        ext_hook: decodes extension types; its exceptions other than ValueError and TypeError propagate.
    """
    with _making:
        return partial(_checked, msgspec.msgpack.Decoder(kind, ext_hook=ext_hook).decode)


def from_json(raw: Raw, kind: type[T], *, strict: bool = True) -> T:
    """Decode JSON; raise MalformedMessage if ``raw`` is not a ``kind``."""
    value: T = _checked(_decoder(msgspec.json.Decoder, kind, strict).decode, raw)
    return value


def convert(value: object, kind: type[T]) -> T:
    """Convert ``value`` to ``kind``; raise MalformedMessage if that is not possible."""
    _decoder(msgspec.msgpack.Decoder, kind)
    result: T = _checked(partial(msgspec.convert, type=kind), value)
    return result


def _checked(decode: Callable[[Any], Any], raw: Any) -> Any:
    try:
        return decode(raw)
    except RecursionError as error:
        raise MalformedMessage("lists or maps are nested too deeply") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MalformedMessage(str(error)) from error


def _decoder(maker: Any, kind: Any, strict: bool = True) -> Any:
    key = maker, kind, strict
    if (found := _decoders.get(key)) is None:
        with _making:
            if (found := _decoders.get(key)) is None:
                found = _decoders[key] = maker(kind, strict=strict)
    return found


def _after_fork_in_child() -> None:
    global _making
    _making = threading.Lock()  # the old one may be held by a thread that does not exist in the child


os.register_at_fork(after_in_child=_after_fork_in_child)
