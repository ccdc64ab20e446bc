"""Calls in torch's profiler: a range around each call, and one around the function that serves it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler


def is_on() -> bool:
    """Whether a profiler of torch runs in this process."""
    return profiler._is_profiler_enabled


def span(name: str, caller: str, callee: str) -> AbstractContextManager[Any]:
    """A range of the profiler, ``rpc:name(caller->callee)``."""
    return profiler.record_function(f"rpc:{name}({caller}->{callee})")
