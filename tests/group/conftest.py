"""Worlds shared by the tests of a module, and the end of those that a test leaves open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import null_backend
from .worlds import Worlds


@pytest.fixture(autouse=True)
def _no_null_group_stays_open() -> Iterator[None]:
    yield
    null_backend.close_all()


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()
