"""A network of hosts that a test can cut."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from shoal.testing import Network
from shoal.testing.network import why_unavailable

unavailable = cache(why_unavailable)


@pytest.fixture
def network() -> Iterator[Network]:
    """Hosts a to c; the test is skipped where there can be none."""
    if reason := unavailable():
        pytest.skip(reason)
    with Network(*"abc") as network:
        yield network
