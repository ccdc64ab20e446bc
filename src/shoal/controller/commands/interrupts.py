"""Ctrl-C in code that must not be interrupted.

While a master is open, a C handler (cpp/python/interrupt.cc) wraps the program's SIGINT handler. Where an
exception must not be raised, in torch's C++ code and in functions marked here, it raises the signal again a
moment later. A handler that the program sets meanwhile is kept; Python's own, which notebooks set per cell,
is wrapped again.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal converts results to enums, 10 us per call
import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from ... import _core
from ...common.interrupts import defer_sigint

F = TypeVar("F", bound=Callable[..., Any])

#: code of marked functions -> whether a Ctrl-C waits until they return
_deferring: dict[CodeType, bool] = {}
#: our handler, wrapping Python's default handler
_guarded_default = _core.guard_interrupts(_signal.default_int_handler, _deferring)
_open = False
#: the IPython shell, if the program runs in one
_shell: Any = None


def defer_interrupt(fn: F) -> F:
    """Decorate a function that Ctrl-C does not interrupt while a master is open; it is handled afterwards."""
    _deferring[fn.__code__] = True
    return fn


def interruptible(fn: F) -> F:
    """Decorate a function that a Ctrl-C does interrupt, even in a :func:`defer_interrupt` function."""
    _deferring[fn.__code__] = False
    return fn


def call_without_interrupt(fn: Callable[[], object]) -> None:
    """Call `fn`; a Ctrl-C during the call is handled after it, by any handler."""
    defer_sigint(fn, _guarded)


def _guarded(handler: Any) -> Any:
    return _guarded_default if handler is _signal.default_int_handler and _open else handler


def protect() -> None:
    """Keep Ctrl-C out of torch's C++ code and :func:`defer_interrupt` functions until :func:`unprotect`."""
    global _open, _shell
    _open = True
    if threading.current_thread() is threading.main_thread():
        handler = _signal.getsignal(_signal.SIGINT)
        if callable(handler) and _core.guarded_handler(handler) is None:
            _signal.signal(_signal.SIGINT, _core.guard_interrupts(handler, _deferring))
    ipython = sys.modules.get("IPython")
    _shell = None if ipython is None else ipython.get_ipython()
    if _shell is not None:
        _shell.events.register("pre_run_cell", _protect_cell)


def unprotect() -> None:
    """Undo :func:`protect`; a handler that the program set meanwhile is kept."""
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
        _signal.signal(_signal.SIGINT, _guarded_default)
