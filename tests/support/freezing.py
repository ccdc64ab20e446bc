"""Keeps the garbage collector away from what is imported before a process forks."""

from __future__ import annotations

import gc
import sys


def freeze() -> None:
    """Move all objects out of the collector's sight, so that no fork walks over all of torch.

    Not where triton is loaded: triton 3.9 prints what is left at the end as leaks.
    """
    if "triton" not in sys.modules:
        gc.freeze()
