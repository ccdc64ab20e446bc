"""Folders in memory, for tests in which processes die and the machine does not."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder whose files cost no disk, if the machine has any such; it is removed at the end."""
    shared = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as name:
        yield Path(name)
