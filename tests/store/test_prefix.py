"""Views of a store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.errors import StoreTimeout
from shoal.store import MemoryStore, PrefixStore, Store, TCPStore, TCPStoreServer

from .conformance import StoreConformance


class TestPrefixStoreOverTCP(StoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with (
            TCPStoreServer(secret=b"s", records={"key": b"of others", "jo": b"", "job": b""}) as server,
            PrefixStore("job", TCPStore("127.0.0.1", server.port, b"s", timeout=30)) as store,
        ):
            yield store


class TestPrefixStoreInPrefixStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with PrefixStore("", PrefixStore("a/b", MemoryStore(30))) as store:
            yield store


def test_views_with_different_prefixes_do_not_meet() -> None:
    below = MemoryStore()
    one, two = PrefixStore("one", below), PrefixStore("two", below)
    one.set("key", b"1")
    two.set("key", b"2")
    assert one.get("key") == b"1"
    assert two.list_keys() == ["key"]
    assert two.num_keys() == 1
    assert below.list_keys() == ["one/key", "two/key"]


def test_a_timeout_names_the_full_key() -> None:
    view = PrefixStore("job", PrefixStore("epoch-3", MemoryStore()))
    with pytest.raises(StoreTimeout, match="'epoch-3/job/key'"):
        view.get("key", 0)


def test_the_view_knows_what_it_views() -> None:
    below = MemoryStore(7)
    view = PrefixStore("job", below)
    assert (view.prefix, view.store, view.timeout) == ("job", below, 7)
