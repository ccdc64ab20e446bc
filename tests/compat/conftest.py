"""Fixtures: ranks of torch.distributed, shared by all tests of the session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from .pool import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """``ranks(2)``: the pool of two ranks; ``ranks(4)``: that of four."""
    pools: dict[int, Pool] = {}
    with contextlib.ExitStack() as stack:

        def pool(size: int) -> Pool:
            if size not in pools or not pools[size].usable:
                pools[size] = stack.enter_context(Pool(size))
            return pools[size]

        yield pool
        for one in pools.values():
            one.close()
