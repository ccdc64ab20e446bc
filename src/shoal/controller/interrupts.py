"""Ctrl-C while something must not stop halfway."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal makes enums of what this gives, for 10 us a call
import threading
from collections.abc import Callable, Collection
from types import CodeType, FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def undisturbed(fn: Callable[[], object]) -> None:
    """Call ``fn``; a Ctrl-C meanwhile is handled after it."""
    if threading.current_thread() is not threading.main_thread():
        fn()  # Python handles signals in the main thread only
        return
    handler = _signal.getsignal(_signal.SIGINT)
    if not callable(handler):
        fn()
        return
    noted: list[tuple[Any, ...]] = []
    _signal.signal(_signal.SIGINT, lambda *signalled: noted.append(signalled))
    try:
        fn()
    finally:
        _signal.signal(_signal.SIGINT, handler)
        if noted:
            handler(*noted[0])


def spared(functions: Collection[CodeType], fn: Callable[[], T]) -> T:
    """Call ``fn``; a Ctrl-C while one of ``functions`` runs is handled after it, and any other at once."""
    if threading.current_thread() is not threading.main_thread():
        return fn()
    handler = _signal.getsignal(_signal.SIGINT)
    if not callable(handler):
        return fn()
    noted: list[tuple[Any, ...]] = []

    def handle(signalled: int, frame: FrameType | None) -> None:
        if frame is not None and any(frame.f_code is each for each in functions):
            noted.append((signalled, frame))
        else:
            handler(signalled, frame)

    _signal.signal(_signal.SIGINT, handle)
    try:
        return fn()
    finally:
        _signal.signal(_signal.SIGINT, handler)
        if noted:
            handler(*noted[0])
