"""Ctrl-C in a few lines that must not be interrupted."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal converts results to enums, 10 us per call
import threading
from collections.abc import Callable
from typing import Any


def defer_sigint(fn: Callable[[], object], wrap: Callable[[Any], Any] = lambda handler: handler) -> None:
    """Call ``fn``; the handler of a SIGINT during the call runs after it.

    Args:
        wrap: takes the present handler and returns the one to install afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        fn()  # Python handles signals in the main thread only
        return
    handler = _signal.getsignal(_signal.SIGINT)
    if not callable(handler):
        fn()
        return
    handler = wrap(handler)
    noted: list[tuple[Any, ...]] = []
    _signal.signal(_signal.SIGINT, lambda *signalled: noted.append(signalled))
    try:
        fn()
    finally:
        _signal.signal(_signal.SIGINT, handler)
        if noted:
            handler(*noted[0])
