"""Autograd settings and the device guard for backward passes with tensors on nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ... import _core
from ...common.never_compile import never_compile
from ..commands.interrupts import defer_interrupt

#: ``prepared``: the setting to restore in a prepared thread; ``error``: the error of its backward pass
of_thread = threading.local()


def prepare_thread() -> None:
    """Run backward passes of this thread in this thread.

    Torch gives each device an autograd thread and asks the device guard for the number of devices; a guard
    written in Python reports one.
    """
    if not hasattr(of_thread, "prepared"):
        of_thread.prepared = torch._C._is_multithreading_enabled()
    torch._C._set_multithreading_enabled(False)


def restore_thread() -> None:
    """Restore the setting that this thread had before it used nodes."""
    if hasattr(of_thread, "prepared"):
        torch._C._set_multithreading_enabled(of_thread.prepared)
        del of_thread.prepared


@never_compile
@defer_interrupt
def _store(error: BaseException) -> None:
    of_thread.error = error


class DeviceGuard(torch._C._acc.DeviceGuard):
    """The device guard that torch queries.

    Torch also queries it while an exception of an operation leaves a backward pass, and aborts the process if
    the query fails. So the query takes this exception away, and :func:`wrap_engine` raises it. And the guard
    has no ``__dict__``: while an exception is set, Python finds no attribute of an object whose dictionary
    lacks it, as with one that a debugger or a test of leaks has looked at.
    """

    __slots__ = ()

    type_ = _core.constant_override(torch._C._autograd.DeviceType.PrivateUse1, _store)


def wrap_engine(in_use: Callable[[], bool]) -> None:
    """Wrap torch's backward engine to call :func:`prepare_thread` first."""
    engine: Any = torch.autograd.graph._engine_run_backward

    @never_compile
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if not in_use():
            restore_thread()
            return engine(*args, **kwargs)
        prepare_thread()
        of_thread.error = None
        try:
            return engine(*args, **kwargs)
        except SystemError:
            if of_thread.error is not None:
                raise of_thread.error from None
            raise
        finally:
            of_thread.error = None

    torch.autograd.graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
