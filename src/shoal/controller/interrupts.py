"""Ctrl-C while something must not stop halfway."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


def undisturbed(fn: Callable[[], object]) -> None:
    """Call ``fn``; a Ctrl-C meanwhile is handled after it."""
    if threading.current_thread() is not threading.main_thread():
        fn()  # Python handles signals in the main thread only
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        fn()
        return
    noted: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *signalled: noted.append(signalled))
    try:
        fn()
    finally:
        signal.signal(signal.SIGINT, handler)
        if noted:
            handler(*noted[0])
