from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.testing.processes import preload
from tests.support.frozen import frozen

preload("tests.rpc.crew", "encodings.idna")  # a worker that is killed at once must not import for long


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    with frozen():
        yield
