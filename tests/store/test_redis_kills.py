"""A Redis whose server is killed in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import StoreError
from shoal.store.redis.store import RedisStore
from shoal.testing import linearize
from tests.support.redis_server import DURABLE, RedisServer, needs_redis
from tests.support.waiting import until

from .conformance import in_background
from .strikes import again_and_again

pytestmark = needs_redis


def test_requests_go_on_when_the_server_comes_again(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path, *DURABLE) as server,
        RedisStore(server.address, timeout=60) as store,
        in_background() as call,
    ):
        waiting = call(store.get, "key")
        until(lambda: store._backing._streams)
        assert store.add("counter", 1) == 1
        server.kill()
        adding = call(store.add, "counter", 1)
        server.start()
        assert adding.result(60) == 2
        store.set("key", b"value")
        assert waiting.result(60) == b"value"


def _play_through_kills(tmp_path: Path, kills: int) -> None:
    with RedisServer(tmp_path, *DURABLE) as server, RedisStore(server.address, timeout=120) as store:

        def strike() -> None:
            server.kill()
            server.start()

        seed = 0
        with again_and_again(strike, 0.1) as struck:
            while len(struck) < kills:
                linearize.play(store, seed=seed)
                seed += 1


def test_it_is_linearizable_while_the_server_is_killed_and_started(tmp_path: Path) -> None:
    _play_through_kills(tmp_path, 3)


@pytest.mark.stress
def test_it_is_linearizable_while_the_server_is_killed_and_started_many_times(tmp_path: Path) -> None:
    _play_through_kills(tmp_path, 60)


@pytest.mark.filterwarnings("ignore:Redis at .* may lose changes")
def test_a_server_that_comes_again_without_what_it_held_is_an_error_in_words(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, RedisStore(server.address, timeout=60) as store:
        store.set("key", b"value")
        server.kill()
        server.start()
        for operation in (lambda: store.set("key", b"new"), lambda: store.get("key", 0)):
            with pytest.raises(StoreError, match=r"keys have expired.*or the server has lost its data"):
                operation()
        with store.clone(accept_new_data=True) as anew:
            assert anew.list_keys() == []


@pytest.mark.filterwarnings("ignore:Redis at .* may lose changes")
def test_requests_wait_for_a_server_that_is_suspended(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path) as server,
        RedisStore(server.address, timeout=60) as store,
        in_background() as call,
    ):
        for number in range(1, 4):
            with server.suspended():
                adding = call(store.add, "counter", 1)
                until(lambda: not store._backing.job.client._idle)
            assert adding.result(60) == number
