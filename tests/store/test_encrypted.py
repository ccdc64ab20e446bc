"""Everything that a TCP store promises, over TLS."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from shoal.errors import StoreTimeout, VersionMismatch
from shoal.net.tls.stream import TlsStream
from shoal.store import Store, TCPStore, TCPStoreServer

from . import test_lost_connections as of_lost_connections
from .conformance import StoreConformance, in_background
from .test_linearizable import (  # noqa: F401
    _often_in_between,
    tcp,
    test_the_tcp_store_is_linearizable,
    test_the_tcp_store_is_linearizable_though_its_connections_are_cut,
)

SECRET = b"secret"


@pytest.fixture(autouse=True)
def _encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOAL_TLS_CA", "SHOAL_TLS_CERT", "SHOAL_TLS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHOAL_TLS", "1")


@pytest.fixture
def server() -> Iterator[TCPStoreServer]:
    with TCPStoreServer(secret=SECRET) as server:
        yield server


class TestEncryptedStore(StoreConformance):
    @pytest.fixture
    def store(self, server: TCPStoreServer) -> Iterator[Store]:
        with TCPStore("127.0.0.1", server.port, SECRET, timeout=30) as store:
            for line in store._backing._idle:
                assert line.connection is not None
                assert isinstance(line.connection._stream, TlsStream)
            yield store


# What becomes of lost connections, once more.
for _name, _object in vars(of_lost_connections).items():
    if _name.startswith("test_") or _name == "store":
        globals()[_name] = _object


def test_a_store_without_tls_is_refused_at_once_and_says_what_to_set(
    server: TCPStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = time.monotonic()
    with TCPStore("127.0.0.1", server.port, SECRET, timeout=60) as store:
        monkeypatch.setenv("SHOAL_TLS", "0")
        with pytest.raises(VersionMismatch, match=rf"127.0.0.1:{server.port}: .*set SHOAL_TLS=1 for every"):
            TCPStore("127.0.0.1", server.port, SECRET, timeout=60)
        store.set("key", b"value")  # of those that are there nothing changes
    assert time.monotonic() - begun < 20


def test_waits_keep_their_deadline(server: TCPStoreServer) -> None:
    with TCPStore("127.0.0.1", server.port, SECRET, timeout=30) as store, in_background() as call:
        waiting = [call(store.get, f"key{i}", 0.1 * i) for i in range(4)]
        begun = time.monotonic()
        for each in waiting:
            with pytest.raises(StoreTimeout):
                each.result(30)
        assert time.monotonic() - begun < 20


def test_many_clients_wait_at_once(server: TCPStoreServer) -> None:
    clients = [TCPStore("127.0.0.1", server.port, SECRET, timeout=60) for _ in range(30)]
    try:
        with in_background() as call:
            waiting = [call(each.get, "key") for each in clients]
            clients[0].set("key", bytes(100_000))
            assert all(each.result(60) == bytes(100_000) for each in waiting)
    finally:
        for each in clients:
            each.close()
