"""One master with three nodes, which the tests of a process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import shoal
from shoal.controller import Master


class Shared:
    """The master of tests that change nothing of it; a process has one at a time."""

    def __init__(self) -> None:
        self._master: Master | None = None

    def master(self) -> Master:
        """It, open."""
        if self._master is None:
            self._master = shoal.init_master_worker(workers=3)
        return self._master

    def close(self) -> None:
        """End it, until it is needed again."""
        if self._master is not None:
            self._master.close()
            self._master = None


@pytest.fixture(scope="package")
def shared() -> Iterator[Shared]:
    shared = Shared()
    yield shared
    shared.close()


@pytest.fixture
def master(shared: Shared) -> Iterator[Master]:
    """The master; a test that leaves an error unseen fails."""
    torch.manual_seed(0)
    master = shared.master()
    yield master
    master.synchronize()


@pytest.fixture
def no_master(shared: Shared) -> None:
    """This process is none: the test makes its own."""
    shared.close()
