"""One master with three nodes, which the tests of a process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import shoal
from shoal.controller import Master


@pytest.fixture(scope="package")
def shared() -> Iterator[Master]:
    with shoal.init_master_worker(workers=3) as master:
        yield master


@pytest.fixture
def master(shared: Master) -> Iterator[Master]:
    """The master; a test that leaves an error unseen fails."""
    torch.manual_seed(0)
    yield shared
    shared.synchronize()
