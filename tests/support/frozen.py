"""Garbage collection that does not look at torch's many objects each time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """In the block, ``gc.collect()`` looks only at what was made in it: a hundredth of the time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
