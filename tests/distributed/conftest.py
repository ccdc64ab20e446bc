"""The ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from .pool import Pool


@pytest.fixture(scope="package")
def ranks() -> Iterator[Pool]:
    """Four ranks with a default group."""
    with closing(Pool()) as pool:
        yield pool
