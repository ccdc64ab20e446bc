"""Text for numbers, names of ranks, and exceptions in messages."""

from __future__ import annotations

import re
import signal
import threading
import traceback
from collections.abc import Iterable, Sequence
from types import TracebackType


def counted(count: int, noun: str) -> str:
    """Return ``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def shortened(names: Sequence[str], most: int, what: str = "more") -> str:
    """Return ``a, b``, or with more than ``most`` names ``a and 3 more``; ``what`` follows the number."""
    more = f" and {len(names) - most} {what}" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def operation_name(kind: str, number: int, key: int) -> str:
    """Return kind, and number (-1: none) or key (0: none), as in ``all_reduce #7``."""
    name = f"{kind} #{number}" if number >= 0 else kind
    return f"{name} key {key:#x}" if key else name


def format_seconds(time: float) -> str:
    """Return a time in seconds with three digits: ``300 s``, ``4.95 s``."""
    return f"{time:.3g} s" if time < 100 else f"{time:.0f} s"


def format_duration(seconds: float) -> str:
    """Return a time with three digits in the unit that fits: ``12.3 us``, ``840 ms``, ``300 s``."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return format_seconds(seconds)


def signal_name(number: int) -> str:
    """``SIGTERM`` for 15; ``signal 40`` for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ranks_named(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, ``ranks 0, 1``, or ``ranks 0, 2-5`` for 0, 2, 3, 4 and 5."""
    return format_numbers("rank", ranks)


def format_numbers(noun: str, numbers: Iterable[int]) -> str:
    """Return ``core 3`` or ``cores 0, 2-5``, for any noun."""
    ordered = sorted(numbers)
    return (f"{noun} " if len(ordered) == 1 else f"{noun}s ") + format_ranges(ordered)


def describe_error(error: BaseException) -> str:
    """Return ``KeyError: 'x'``, or ``KeyError`` if the exception has no text or its ``__str__`` raises."""
    text = text_of(error)
    return encodable(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, or "" if that (user code) raises."""
    try:
        return str.__str__(str(error))
    except BaseException as raised:
        _raise_interrupt(raised)
        return ""


def error_repr(error: BaseException) -> str:
    """Return ``KeyError('x')``, or :func:`describe_error` if the ``__repr__`` of the exception raises."""
    try:
        return encodable(str.__str__(repr(error)))
    except BaseException as raised:
        _raise_interrupt(raised)
        return describe_error(error)


def traceback_of(error: BaseException, begin: TracebackType | None) -> str:
    """Return the traceback from the frame ``begin`` as text; only the exception if it cannot be formatted."""
    try:
        return encodable("".join(traceback.format_exception(type(error), error, begin)))
    except BaseException as raised:
        _raise_interrupt(raised)
        return f"{describe_error(error)}\n"


def _raise_interrupt(error: BaseException) -> None:
    """Raise ``error`` if it is a Ctrl-C, which is unrelated to the exception being formatted."""
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error


def printable(text: str) -> str:
    """Return untrusted ``text`` with unprintable characters, such as terminal escapes, replaced by "?"."""
    return "".join(each if each.isprintable() else "?" for each in text)


def encodable(text: str) -> str:
    """Return ``text`` with escapes for code points that UTF-8 cannot encode, such as bytes of file names."""
    return text.encode(errors="backslashreplace").decode()


def format_ranges(ordered: Iterable[int], before: str = "") -> str:
    """Return ``0, 2-5`` for the sorted numbers 0, 2, 3, 4 and 5; ``before`` is a prefix of each number."""
    found: list[list[str]] = []
    last = None
    for number in ordered:
        if last is None or number != last + 1:
            found.append([])
        found[-1].append(f"{before}{number}")
        last = number
    short = (run if len(run) < 3 else [f"{run[0]}-{run[-1]}"] for run in found)
    return ", ".join(word for words in short for word in words)


def file_name_part(text: str, ident: str = "") -> str:
    """Return ``text`` with portable characters only; long text is truncated and ``ident`` appended."""
    found = re.sub(r"[^A-Za-z0-9_.]+", "_", text)
    return found if len(found) <= _MAX_PART_LENGTH else f"{found[:_MAX_PART_LENGTH]}_{ident}"


_MAX_PART_LENGTH = 60
