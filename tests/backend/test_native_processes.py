"""The native backend passes the conformance tests with ranks as processes too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.testing import RankPool
from shoal.testing.conformance import BackendConformance

POOLS: dict[int, RankPool] = {}


@pytest.fixture(scope="module", autouse=True)
def _pools_end() -> Iterator[None]:
    yield
    while POOLS:
        POOLS.popitem()[1].close()


class TestProcesses(BackendConformance):
    backend = "native"

    def run(self, fn: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
        if size not in POOLS:
            POOLS[size] = RankPool(size)
        return POOLS[size].run(fn, *args, **self.with_defaults(options))
