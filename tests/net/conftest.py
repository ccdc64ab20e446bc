"""No test of this folder may leave a socket or a thread behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.leaks import nothing_left_behind


@pytest.fixture(autouse=True)
def _leaks() -> Iterator[None]:
    with nothing_left_behind():
        yield
