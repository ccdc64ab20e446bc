"""Decoding of messages: the only module that decodes with msgspec.

Two properties of msgspec (0.22) make a common place necessary:

- A malformed message raises ``MsgspecError``, ``UnicodeDecodeError`` or, if it is nested too deeply,
  ``RecursionError``.  Here it raises :class:`MalformedMessage`.
- The first use of a ``Struct`` collects what msgspec knows of it, and other threads can see that half done:
  they end the process by SIGSEGV (``tests/common/test_decoding.py`` reproduces it).  Here decoders are made
  one at a time, and used when they are complete.
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
    """Bytes or values that are not what was expected; the text says what is wrong, and where."""


def from_msgpack(raw: Raw, kind: type[T]) -> T:
    """Decode msgpack.

    Raises:
        MalformedMessage: ``raw`` is not a ``kind``.
    """
    value: T = _checked(_decoder(msgspec.msgpack.Decoder, kind).decode, raw)
    return value


def msgpack_decoder(
    kind: Any, *, ext_hook: Callable[[int, memoryview], Any] | None = None
) -> Callable[[Raw], Any]:
    """A function that decodes msgpack to ``kind``, a type or a union of types; raises MalformedMessage.

    Args:
        kind: what is expected.
        ext_hook: decodes extension types; its exceptions other than ValueError and TypeError pass through.
    """
    with _making:
        return partial(_checked, msgspec.msgpack.Decoder(kind, ext_hook=ext_hook).decode)


def from_json(raw: Raw, kind: type[T], *, strict: bool = True) -> T:
    """Decode JSON.

    Raises:
        MalformedMessage: ``raw`` is not a ``kind``.
    """
    value: T = _checked(_decoder(msgspec.json.Decoder, kind, strict).decode, raw)
    return value


def converted(value: object, kind: type[T]) -> T:
    """``value`` as a ``kind``.

    Raises:
        MalformedMessage: it cannot be converted.
    """
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
    _making = threading.Lock()  # a thread that the child does not have may have held it


os.register_at_fork(after_in_child=_after_fork_in_child)
