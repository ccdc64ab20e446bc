"""From URLs to stores."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult

import pytest

from shoal.errors import AuthenticationError, UsageError
from shoal.store import (
    FileStore,
    MemoryStore,
    Store,
    TCPStore,
    TCPStoreServer,
    open_store,
    parse_address,
    register_store,
)
from shoal.store import urls as opener


def test_tcp_urls_open_tcp_stores() -> None:
    with (
        TCPStoreServer(secret=b"s") as server,
        open_store(server.url, secret=b"s", timeout=30) as store,
    ):
        assert isinstance(store, TCPStore)
        assert store.timeout == 30
        assert store.num_keys() == 0


def test_the_secret_is_that_of_the_job_unless_another_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("s")
    with TCPStoreServer(secret=b"s") as server:
        for name, value in (("SHOAL_SECRET", "s"), ("SHOAL_SECRET_FILE", str(tmp_path / "secret"))):
            with monkeypatch.context() as patched:
                patched.setenv(name, value)
                with open_store(server.url) as store:
                    assert store.num_keys() == 0
                for other in (b"", b"another"):
                    with pytest.raises(AuthenticationError):
                        open_store(server.url, secret=other)


def test_file_urls_open_file_stores(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/with%20space") as store:
        assert isinstance(store, FileStore)
        store.set("key", b"")
    assert (tmp_path / "with space").exists()


@pytest.mark.parametrize(
    "url",
    ["tcp://host", "tcp://:5", "tcp://host:0", "tcp://host:70000", "tcp://host:x", "file://x/y", "file:"],
)
def test_a_url_that_is_incomplete_is_a_usage_error_that_names_it(url: str) -> None:
    with pytest.raises(UsageError, match=url):
        open_store(url)


@pytest.mark.parametrize("url", ["carrier-pigeon://roof", "", "127.0.0.1:5"])
def test_an_unknown_scheme_is_a_usage_error_that_names_the_known_ones(url: str) -> None:
    with pytest.raises(UsageError, match=r"file://, redis://, rediss://, tcp://"):
        open_store(url)


def test_a_scheme_of_ones_own_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opener, "_openers", dict(opener._openers))

    def open_memory(url: SplitResult, *, secret: bytes, timeout: float | None) -> Store:
        assert (url.netloc, secret) == ("here", b"s")
        return MemoryStore(timeout)

    register_store("memory", open_memory)
    with open_store("memory://here", secret=b"s", timeout=3) as store:
        assert store.timeout == 3
    with pytest.raises(UsageError, match="registered already"):
        register_store("memory", open_memory)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:5", ("127.0.0.1", 5)),
        ("localhost", ("localhost", 0)),
        ("[::1]:5", ("::1", 5)),
        ("[::1]", ("::1", 0)),
        (" host:0 ", ("host", 0)),
    ],
)
def test_addresses_are_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", ":5", "host:", "host:x", "host:70000", "::1", "::1:5"])
def test_an_address_that_makes_no_sense_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="address"):
        parse_address(text)
