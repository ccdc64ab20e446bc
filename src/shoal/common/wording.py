"""Numbers, names of ranks, and exceptions in sentences."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterable
from types import TracebackType


def counted(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def in_seconds(time: float) -> str:
    """``300 s``, ``4.95 s``: a time in seconds, of which three digits matter."""
    return f"{time:.3g} s" if time < 100 else f"{time:.0f} s"


def ranks_named(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 1``, or ``ranks 0, 2-5`` for 0, 2, 3, 4 and 5."""
    return named("rank", ranks)


def named(noun: str, numbers: Iterable[int]) -> str:
    """``core 3``, ``cores 0, 2-5``: things that are known by their numbers."""
    ordered = sorted(numbers)
    return (f"{noun} " if len(ordered) == 1 else f"{noun}s ") + runs(ordered)


def in_words(error: BaseException) -> str:
    """``KeyError: 'x'``, or ``KeyError`` alone if the exception has no text, or its ``__str__`` raises."""
    text = text_of(error)
    return encodable(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def text_of(error: BaseException) -> str:
    """``str(error)``; "" if that raises, which is code of the user."""
    try:
        return str.__str__(str(error))
    except BaseException as raised:
        _raise_interrupt(raised)
        return ""


def shown(error: BaseException) -> str:
    """``KeyError('x')``; as :func:`in_words` if the ``__repr__`` of the exception raises."""
    try:
        return encodable(str.__str__(repr(error)))
    except BaseException as raised:
        _raise_interrupt(raised)
        return in_words(error)


def traceback_of(error: BaseException, begin: TracebackType | None) -> str:
    """The traceback from the frame ``begin`` on, as text; the exception alone if Python cannot format it."""
    try:
        return encodable("".join(traceback.format_exception(type(error), error, begin)))
    except BaseException as raised:
        _raise_interrupt(raised)
        return f"{in_words(error)}\n"


def _raise_interrupt(error: BaseException) -> None:
    """Raise a Ctrl-C, which has nothing to do with the exception that was to be shown."""
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error


def printable(text: str) -> str:
    """``text`` with question marks for what could move a terminal's cursor, or more: others wrote it."""
    return "".join(each if each.isprintable() else "?" for each in text)


def encodable(text: str) -> str:
    """``text`` with escapes for what UTF-8 has no code for, such as bytes of file names in errors."""
    return text.encode(errors="backslashreplace").decode()


def runs(ordered: Iterable[int], before: str = "") -> str:
    """``0, 2-5`` for 0, 2, 3, 4 and 5, which come in this order; ``before`` is put before each number."""
    found: list[list[str]] = []
    last = None
    for number in ordered:
        if last is None or number != last + 1:
            found.append([])
        found[-1].append(f"{before}{number}")
        last = number
    short = (run if len(run) < 3 else [f"{run[0]}-{run[-1]}"] for run in found)
    return ", ".join(word for words in short for word in words)
