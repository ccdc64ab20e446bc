"""The settings and guards that torch's autograd needs for backward passes over nodes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from ...common.uncompiled import uncompiled
from ..commands.interrupts import uncut

#: has ``prepared`` in threads that were: what to restore; and the ``error`` that ended a backward pass
of_thread = threading.local()


def prepare_thread() -> None:
    """Let backward passes of this thread run in it.

    Torch gives each device a thread of autograd and asks the device guard how many there are; a guard in
    Python knows of one.
    """
    if not hasattr(of_thread, "prepared"):
        of_thread.prepared = torch._C._is_multithreading_enabled()
    torch._C._set_multithreading_enabled(False)


def restore_thread() -> None:
    """Let backward passes of this thread run as they did before it used nodes."""
    if hasattr(of_thread, "prepared"):
        torch._C._set_multithreading_enabled(of_thread.prepared)
        del of_thread.prepared


@uncompiled
class DeviceGuard(torch._C._acc.DeviceGuard):
    """The device, as torch asks about it.

    Torch asks also while an error of an operation leaves a backward pass, and aborts the process if Python
    answers with that error pending: it is kept aside here, and the backward pass raises it.
    """

    @uncut
    def type_(self) -> Any:
        """The type of the device; asked where C++ may raise nothing."""
        try:
            _raise_pending()
        except BaseException as error:
            of_thread.error = error
        return torch._C._autograd.DeviceType.PrivateUse1


#: any function of Python's, called so: ctypes raises an error that is pending after it
_raise_pending = ctypes.pythonapi.PyErr_Occurred


def wrap_engine(in_use: Callable[[], bool]) -> None:
    """Prepare threads that begin a backward pass: that may be the first that one does."""
    engine: Any = torch.autograd.graph._engine_run_backward

    @uncompiled
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
