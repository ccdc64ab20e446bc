"""The stores under torch's names: its constructors, its methods, its timedeltas."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest

import shoal
import shoal.distributed as dist
from tests.support.ports import free_port


def _used_as_torchs(store: dist.Store) -> None:
    """What scripts do with a store of torch."""
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.add("counter", 2) == 2
    store.wait(["key"], timedelta(seconds=5))
    assert store.check(["key"])
    assert store.compare_set("key", "value", "other") == b"other"
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["a", "b"]) == [b"1", b"2"]
    assert store.delete_key("a") is True
    assert store.num_keys() == 3
    assert store.has_extended_api()
    store.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(shoal.StoreTimeout):
        store.get("missing")
    with pytest.raises(shoal.StoreTimeout):
        store.wait(["missing"], timedelta(milliseconds=10))


def test_a_store_in_memory() -> None:
    with dist.HashStore() as store:
        _used_as_torchs(store)


def test_a_store_in_a_file(tmp_path: Path) -> None:
    with dist.FileStore(str(tmp_path / "store"), 1) as store:
        _used_as_torchs(store)


def test_a_store_with_a_prefix() -> None:
    with dist.HashStore() as below, dist.PrefixStore("p", below) as store:
        assert store.underlying_store is below
        _used_as_torchs(store)
        assert below.check(["p/key"])


def test_a_store_on_the_network_waits_for_its_workers() -> None:
    with dist.TCPStore("localhost", 0, None, True, timedelta(seconds=20)) as probe:
        _used_as_torchs(probe)
        assert probe.port > 0
    port = free_port()
    stores: list[dist.Store] = []

    def serve() -> None:
        stores.append(dist.TCPStore("localhost", port, 2, True, timedelta(seconds=20)))

    master = threading.Thread(target=serve)
    master.start()
    with dist.TCPStore("localhost", port, 2, False, timedelta(seconds=20)) as worker:
        master.join()
        worker.set("key", "value")
        with stores[0] as store:
            assert store.get("key") == b"value"
    with pytest.raises(shoal.StoreTimeout):
        dist.TCPStore("localhost", 0, 2, True, timedelta(milliseconds=30))
    with pytest.raises(shoal.UsageError, match="opens its own socket"):
        dist.TCPStore("localhost", 0, master_listen_fd=3)


def test_a_store_on_the_network_is_its_users_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_SECRET", raising=False)
    monkeypatch.delenv("SHOAL_SECRET_FILE", raising=False)
    with dist.TCPStore("localhost", 0, None, True, timedelta(seconds=20)) as store:
        with pytest.raises(shoal.AuthenticationError):
            shoal.TCPStore("localhost", store.port, timeout=20)
        with dist.TCPStore("localhost", store.port, timeout=timedelta(seconds=20)) as other:
            other.set("key", "value")
        assert store.get("key") == b"value"
