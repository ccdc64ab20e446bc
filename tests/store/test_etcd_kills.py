"""An etcd whose servers are killed in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.store.etcd.store import EtcdStore
from shoal.testing import linearize
from tests.support.etcd_server import EtcdServer, etcd_cluster, leader_of, needs_etcd
from tests.support.waiting import until

from .conformance import in_background
from .strikes import again_and_again

pytestmark = needs_etcd


def test_requests_go_on_when_the_server_comes_again(tmp_path: Path) -> None:
    with (
        EtcdServer(tmp_path, durable=True) as server,
        EtcdStore([server.address], timeout=60) as store,
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


@pytest.mark.stress
def test_it_is_linearizable_while_the_server_is_killed_and_started(tmp_path: Path) -> None:
    with (
        EtcdServer(tmp_path, durable=True) as server,
        EtcdStore([server.address], timeout=120) as store,
    ):

        def strike() -> None:
            server.kill()
            server.start()

        seed = 0
        with again_and_again(strike, 0.3) as struck:
            while len(struck) < 8:
                linearize.play(store, seed=seed)
                seed += 1


@pytest.mark.stress
def test_requests_go_on_while_a_server_is_suspended(tmp_path: Path) -> None:
    with (
        etcd_cluster(tmp_path, 3) as servers,
        EtcdStore([each.address for each in servers], timeout=120) as store,
    ):
        for number in range(1, 4):
            leader = until(lambda: leader_of(servers))
            store._backing.job.client._at = servers.index(leader)
            with leader.suspended():
                assert store.add("counter", 1) == number


@pytest.mark.stress
def test_it_is_linearizable_while_leaders_are_killed(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path, 3) as servers:

        def strike() -> None:
            leader = until(lambda: leader_of(servers))
            leader.kill()
            others = [each for each in servers if each is not leader]
            until(lambda: leader_of(others))
            leader.start()

        with EtcdStore([each.address for each in servers], timeout=120) as store:
            seed = 0
            with again_and_again(strike, 0.3) as struck:
                while len(struck) < 5:
                    linearize.play(store, seed=seed, operations=200)
                    seed += 1
