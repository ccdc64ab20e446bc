"""Ctrl-C while something must not stop halfway."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal makes enums of what this gives, for 10 us a call
import threading
from collections.abc import Callable
from typing import Any


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
