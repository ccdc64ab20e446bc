"""Worlds shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .worlds import Worlds


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()
