"""What torch's autograd needs to run backward passes over nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

#: has ``prepared`` in threads that were
of_thread = threading.local()


def prepare_thread() -> None:
    """Let backward passes of this thread run in it.

    Torch gives each device a thread of autograd and asks the device guard how many there are; a guard in
    Python knows of one.
    """
    torch._C._set_multithreading_enabled(False)
    of_thread.prepared = True


def wrap_engine(in_use: Callable[[], bool]) -> None:
    """Prepare threads that begin a backward pass: that may be the first that one does."""
    engine: Any = torch.autograd.graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if in_use():
            prepare_thread()
        return engine(*args, **kwargs)

    torch.autograd.graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
