"""Ctrl-C while something must not stop halfway.

While a master is open, a handler in C stands before the program's (cpp/bind/interrupt.cc): it lets a Ctrl-C
come again a moment later where an exception may not be raised, which is in torch's C++ and in functions that
are marked here.  A handler that the program sets meanwhile stays; where that is Python's own, which notebooks
set for each cell, ours goes before it again.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal makes enums of what this gives, for 10 us a call
import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from ... import _core

F = TypeVar("F", bound=Callable[..., Any])

#: code of functions: whether a Ctrl-C waits for their end
_marks: dict[CodeType, bool] = {}
#: our handler before Python's own
_usual = _core.guard_interrupts(_signal.default_int_handler, _marks)
_open = False
#: IPython's, if the program runs in its cells
_shell: Any = None


def uncut(fn: F) -> F:
    """Decorates a function that a Ctrl-C does not end while a master is open: it comes after it."""
    _marks[fn.__code__] = True
    return fn


def waiting(fn: F) -> F:
    """Decorates a function that a Ctrl-C does end, also if an :func:`uncut` one has called it."""
    _marks[fn.__code__] = False
    return fn


def undisturbed(fn: Callable[[], object]) -> None:
    """Call ``fn``; a Ctrl-C meanwhile is handled after it, whichever handler there is."""
    if threading.current_thread() is not threading.main_thread():
        fn()  # Python handles signals in the main thread only
        return
    handler = _signal.getsignal(_signal.SIGINT)
    if not callable(handler):
        fn()
        return
    if handler is _signal.default_int_handler and _open:
        handler = _usual
    noted: list[tuple[Any, ...]] = []
    _signal.signal(_signal.SIGINT, lambda *signalled: noted.append(signalled))
    try:
        fn()
    finally:
        _signal.signal(_signal.SIGINT, handler)
        if noted:
            handler(*noted[0])


def protect() -> None:
    """Let no Ctrl-C meet torch's C++, nor what is :func:`uncut`, until :func:`unprotect`."""
    global _open, _shell
    _open = True
    if threading.current_thread() is threading.main_thread():
        handler = _signal.getsignal(_signal.SIGINT)
        if callable(handler) and _core.guarded_handler(handler) is None:
            _signal.signal(_signal.SIGINT, _core.guard_interrupts(handler, _marks))
    ipython = sys.modules.get("IPython")
    _shell = None if ipython is None else ipython.get_ipython()
    if _shell is not None:
        _shell.events.register("pre_run_cell", _protect_cell)


def unprotect() -> None:
    """Undo :func:`protect`; a handler that the program has set meanwhile stays."""
    global _open, _shell
    _open = False
    if _shell is not None:
        _shell.events.unregister("pre_run_cell", _protect_cell)
        _shell = None
    if threading.current_thread() is threading.main_thread():
        handler = _core.guarded_handler(_signal.getsignal(_signal.SIGINT))
        if handler is not None:
            _signal.signal(_signal.SIGINT, handler)


def _protect_cell(*_: object) -> None:
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _usual)
