"""Fixtures: ranks of torch.distributed, shared by all tests of the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .pool import Pool, Pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """``ranks(2)``: the pool of two ranks; ``ranks(4)``: that of four."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Processes without a group."""
    pools = Pools(backend=None)
    yield pools
    pools.close()


@pytest.fixture
def three(pools: Pools) -> Pool:
    """Three processes without a group."""
    return pools(3)
