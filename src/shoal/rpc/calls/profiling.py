"""Ranges of torch's profiler around each call and each handler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler


def is_on() -> bool:
    """Whether torch's profiler is running in this process."""
    return profiler._is_profiler_enabled


def span(name: str, caller: str, callee: str) -> AbstractContextManager[Any]:
    """Return a profiler range ``rpc:name(caller->callee)``."""
    return profiler.record_function(f"rpc:{name}({caller}->{callee})")
