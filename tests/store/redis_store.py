"""A store in a real Redis, for tests: fixtures to be imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.store.redis.store import RedisStore
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def store(server: RedisServer, job: str) -> Iterator[RedisStore]:
    with RedisStore(server.address, job, timeout=60) as store:
        yield store
