"""Helpers for commands that measure for minutes: early checks, and cleanup after signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType
from typing import NoReturn

#: signals whose default action ends a program without running its ``finally`` clauses
_ENDING = (signal.SIGTERM, signal.SIGHUP)


def installed(module: str) -> bool:
    """Whether ``module`` can be imported; check it before measuring."""
    return find_spec(module) is not None


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

    # Under nohup SIGHUP is ignored, and stays ignored.
    before = {number: signal.getsignal(number) for number in _ENDING}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer Ctrl-C, SIGTERM and SIGHUP until the end of the block; no effect in other threads than main."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDING)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, lambda ended, _: noted.append(ended))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for came in noted:
            signal.raise_signal(came)
