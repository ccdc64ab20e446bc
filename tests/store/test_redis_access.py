"""Who may talk to a Redis, and whom it talks to: passwords, permissions and certificates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import AuthenticationError, ConfigurationError, StoreError
from shoal.store import open_store
from shoal.store.external.tls import tls_context
from shoal.store.redis.connection import RedisClient
from shoal.store.redis.store import RedisStore
from tests.support.certificates import keys
from tests.support.redis_server import DURABLE, RedisServer, needs_redis
from tests.support.waiting import until

from .conformance import in_background

__all__ = ["keys"]  # a fixture

pytestmark = [needs_redis, pytest.mark.filterwarnings("ignore:Redis at .* may lose changes")]

PASSWORD = "pass word/@:?"
#: as docs/stores.md has it
PERMISSIONS = (
    "~{shoal:*", "&{shoal:*", "+eval", "+evalsha", "+subscribe", "+unsubscribe", "+publish", "+select",
    "+time", "+hget", "+hset", "+hdel", "+hkeys", "+hexists", "+hstrlen", "+hincrby", "+del", "+pexpireat",
    "+zadd", "+zrem", "+zcount", "+zremrangebyscore",
)  # fmt: skip


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis where user ``ranks`` may touch what jobs of shoal write, and nothing else."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        server.ask("ACL", "SETUSER", "ranks", "on", f">{PASSWORD}", *PERMISSIONS)
        server.ask("ACL", "SETUSER", "stranger", "on", f">{PASSWORD}", "~mine:*", "&*", "+@all")
        server.ask("ACL", "SETUSER", "mute", "on", f">{PASSWORD}", *PERMISSIONS, "resetchannels")
        server.ask("CONFIG", "SET", "requirepass", "of the administrator")
        yield server


@pytest.fixture
def store(guarded: RedisServer) -> Iterator[RedisStore]:
    with RedisStore(guarded.address, user="ranks", password=PASSWORD, timeout=60) as store:
        yield store


def test_the_permissions_of_the_page_are_enough(store: RedisStore) -> None:
    with in_background() as call, store.clone() as other:
        waiting = call(other.get, "key")
        until(lambda: other._backing._streams)
        store.set("key", b"value")
        assert waiting.result(30) == b"value"
    assert store.add("counter", 2) == 2
    store.append("counter", "0")
    assert store.compare_set("counter", "20", "30") == b"30"
    store.wait(["key", "counter"], 0)
    assert store.num_keys() == len(store.list_keys()) == 2
    assert store._backing.job._keep_alive(store._deadline(60))
    assert store.delete("key")
    assert store.delete_prefix("") == 1


def test_the_page_names_these_permissions() -> None:
    page = (Path(__file__).parents[2] / "docs/stores.md").read_text()
    for each in PERMISSIONS:
        assert each in page, each


def test_who_logs_in_may_be_in_the_url(guarded: RedisServer) -> None:
    quoted = "pass%20word%2F%40%3A%3F"
    with open_store(f"redis://ranks:{quoted}@{guarded.address}/1", timeout=60) as store:
        store.set("key", b"")


def test_who_logs_in_may_be_in_the_environment(guarded: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_STORE_USER", "ranks")
    monkeypatch.setenv("SHOAL_STORE_PASSWORD", PASSWORD)
    with open_store(guarded.url, timeout=60) as store:
        store.set("key", b"")


def test_a_password_alone_is_that_of_the_default_user(guarded: RedisServer) -> None:
    with RedisStore(guarded.address, password="of the administrator", timeout=60) as store:
        store.set("key", b"")


def test_a_wrong_password_is_named_and_not_shown(guarded: RedisServer) -> None:
    with pytest.raises(AuthenticationError, match="does not accept user 'ranks' with this") as raised:
        RedisStore(guarded.address, user="ranks", password="guess", timeout=60)
    assert "guess" not in str(raised.value)


def test_a_redis_that_asks_for_a_password_is_named(guarded: RedisServer) -> None:
    with pytest.raises(AuthenticationError, match="asks for a password: set SHOAL_STORE_PASSWORD"):
        RedisStore(guarded.address, timeout=60)


def test_a_password_for_a_redis_that_asks_for_none_is_named(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, pytest.raises(AuthenticationError, match="asks for no password"):
        RedisStore(server.address, password=PASSWORD, timeout=60)


@pytest.mark.parametrize("user", ["stranger", "mute"])
def test_a_user_who_may_not_write_here_is_named_before_anything_is_written(
    guarded: RedisServer, user: str
) -> None:
    with pytest.raises(StoreError, match=rf"user '{user}' lacks permission: .*docs/stores\.md"):
        RedisStore(guarded.address, "other", user=user, password=PASSWORD, timeout=60)
    assert guarded.ask("EXISTS", "{shoal:other}", password="of the administrator") == 0


def test_a_permission_that_is_taken_meanwhile_is_an_error_and_nothing_is_done(
    guarded: RedisServer, store: RedisStore
) -> None:
    store.set("key", b"value")
    guarded.ask("ACL", "SETUSER", "ranks", "-hset", password="of the administrator")
    try:
        with pytest.raises(StoreError, match="user 'ranks' lacks permission"):
            store.set("key", b"new")
        assert store.get("key") == b"value"
    finally:
        guarded.ask("ACL", "SETUSER", "ranks", "+hset", password="of the administrator")
    store.set("key", b"new")


def test_a_password_that_was_changed_meanwhile_is_an_error_of_the_store(store: RedisStore) -> None:
    client = store._backing.job.client
    client._drop_idle()
    client._password = "old"
    with pytest.raises(StoreError, match="does not accept user 'ranks'"):
        store.set("key", b"")
    client._password = PASSWORD


# -- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encrypted(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis that talks only to clients with a certificate of its own authority."""
    options = [
        "--tls-port", "PORT", "--port", "0", "--tls-cert-file", str(keys / "server.pem"),
        "--tls-key-file", str(keys / "server.key"), "--tls-ca-cert-file", str(keys / "ca.pem"),
    ]  # fmt: skip
    with RedisServer(tmp_path_factory.mktemp("redis"), *options, *DURABLE) as server:
        yield server


def test_certificates_of_an_authority_of_ones_own(
    encrypted: RedisServer, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = f"?ca={keys}/ca.pem&cert={keys}/client.pem&key={keys}/client.key"
    with open_store(f"rediss://{encrypted.address}{files}", timeout=60) as store, in_background() as call:
        other = store.clone()
        waiting = call(other.get, "key")
        until(lambda: other._backing._streams)
        store.set("key", bytes(2**20))
        assert waiting.result(30) == bytes(2**20)
        assert [store.add("counter", 1) for _ in range(20)] == list(range(1, 21))
        waiting = call(other.get, "never")
        until(lambda: other._backing._streams)
        other.close()
        with pytest.raises(StoreError, match="has been closed"):
            waiting.result(30)


def test_a_side_that_the_other_does_not_trust_is_named(encrypted: RedisServer, keys: Path) -> None:
    with pytest.raises(AuthenticationError, match=r"certificate of Redis at 127.*ca= in the URL"):
        RedisStore(encrypted.address, tls=tls_context(None, None, None), timeout=60)
    with pytest.raises(
        AuthenticationError, match=r"requires a client certificate of its own authority.*cert= and key="
    ):
        RedisStore(encrypted.address, tls=tls_context(str(keys / "ca.pem"), None, None), timeout=60)


def test_plain_against_tls_is_named(encrypted: RedisServer, guarded: RedisServer, keys: Path) -> None:
    with pytest.raises(StoreError, match="uses TLS: use rediss:// instead of redis://"):
        RedisStore(encrypted.address, timeout=60)
    with pytest.raises(StoreError, match="does not use TLS: use redis:// instead of rediss://"):
        RedisStore(guarded.address, tls=tls_context(str(keys / "ca.pem"), None, None), timeout=60)


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(ConfigurationError, match=r"need redis: pip install shoal\[redis\]"):
        RedisClient("127.0.0.1:6379")
