from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.frozen import frozen


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    with frozen():
        yield
