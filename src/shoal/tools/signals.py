"""Signals to commands that measure for minutes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

#: signals whose default action ends a program without running its ``finally`` clauses
_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let ``handler`` handle these signals in the block, except ignored ones (SIGHUP under nohup)."""
    found = {number: signal.getsignal(number) for number in numbers}
    before = {number: old for number, old in found.items() if old not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def cleaning_up() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise an exception in the block, as Ctrl-C does.

    While the exception propagates, directories are removed, ranks are killed, and further signals are
    ignored. The exit code is 128 + the signal. Only for the main thread, like Python's signal handlers.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for one in _ENDING:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    with _handled(_ENDING, end):
        yield


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer Ctrl-C, SIGTERM and SIGHUP until the end of the block; no effect in other threads than main."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []
    try:
        with _handled((signal.SIGINT, *_ENDING), lambda number, _: noted.append(number)):
            yield
    finally:
        for number in noted:
            signal.raise_signal(number)
