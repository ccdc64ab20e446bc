"""Fixtures: ranks of torch.distributed, shared by all tests of the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .pool import Pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """``ranks(2)``: the pool of two ranks; ``ranks(4)``: that of four."""
    pools = Pools()
    yield pools
    pools.close()
