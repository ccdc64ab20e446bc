"""The native backend passes the conformance tests with ranks as processes too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.testing import RankPool
from shoal.testing.conformance import BackendConformance

#: smaller groups use its first ranks
POOL = RankPool(4)


@pytest.fixture(scope="module", autouse=True)
def _pool_ends() -> Iterator[None]:
    yield
    POOL.close()


class TestProcesses(BackendConformance):
    backend = "native"

    def run(self, fn: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
        return POOL.run(fn, *args, size=size, **self.with_defaults(options))
