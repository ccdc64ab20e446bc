"""One master with three nodes, which the tests of a process share.

``init_master_worker(workers=n)`` is quick here, also in the programs of ``nodes.programs``: its workers are
forks, and three take 0.1 s.  So a test may have a master of its own (``no_master``), of started workers or of
a ``nodes.Crew``, whose workers join.  The tests of the start of Python ask for ``python_starts``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import shoal
from shoal.controller import Master
from shoal.store import TCPStoreServer
from tests.controller.nodes import SECRET
from tests.support.quick_workers import nursery, quick_workers, start_at, start_python


class Shared:
    """The master of tests that change nothing of it; a process has one at a time."""

    def __init__(self) -> None:
        self._master: Master | None = None

    def master(self) -> Master:
        """It, open."""
        if self._master is None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SHOAL_HEARTBEAT_TIMEOUT", "1000")  # tests stop nodes, and machines are busy
                self._master = shoal.init_master_worker(workers=3)
        return self._master

    def close(self) -> None:
        """End it, until it is needed again."""
        if self._master is not None:
            self._master.close()
            self._master = None


@pytest.fixture(scope="package", autouse=True)
def quick() -> Iterator[None]:
    """The workers of masters are forks."""
    with quick_workers():
        yield


@pytest.fixture
def python_starts(no_master: None) -> Iterator[None]:
    """Each worker is a new Python, as for users; that takes seconds."""
    start_python()
    yield
    start_at(nursery())


@pytest.fixture(scope="package")
def shared(quick: None) -> Iterator[Shared]:
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
def url() -> Iterator[str]:
    """The address of a store that outlives masters."""
    with TCPStoreServer(secret=SECRET.encode()) as server:
        yield server.url


@pytest.fixture
def no_master(shared: Shared) -> None:
    """This process is none: the test makes its own."""
    shared.close()
