"""A store in a real etcd, for tests: fixtures to be imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.store.etcd.store import EtcdStore
from tests.support.etcd_server import EtcdServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def store(server: EtcdServer, job: str) -> Iterator[EtcdStore]:
    with EtcdStore([server.address], job, timeout=60) as store:
        yield store
