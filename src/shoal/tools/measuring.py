"""Helpers of commands that measure for minutes: they check first, and clean up however they end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType
from typing import NoReturn

#: signals that end a program without running its ``finally`` clauses, unless it asks for them
_ENDING = (signal.SIGTERM, signal.SIGHUP)


def installed(module: str) -> bool:
    """Whether ``module`` can be imported; asked before anything is measured."""
    return find_spec(module) is not None


@contextmanager
def cleaning_up() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block by an exception, as Ctrl-C does.

    On the exception's way out folders are removed and ranks are killed; a second signal is ignored meanwhile.
    The exit code is 128 + the signal.  Only for the main thread, as Python's signal handlers are.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for one in _ENDING:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    # nohup ignores SIGHUP, and then it stays so.
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
def undisturbed() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP come after the block; only for the main thread, as they come there."""
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
