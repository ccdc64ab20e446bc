"""Waiting for what rings no bell: tests look every few milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: seconds; only what hangs takes as long
PATIENCE = 60.0


def until(
    condition: Callable[[], T], shown: Callable[[], object] | None = None, *, patience: float = PATIENCE
) -> T:
    """Wait for ``condition()`` to be true; returns its value.

    Args:
        shown: what the error shows if it never is; by default the last value.
        patience: seconds that it may take.
    """
    end = time.monotonic() + patience
    while not (value := condition()):
        assert time.monotonic() < end, value if shown is None else shown()
        time.sleep(0.002)
    return value
