"""Who may talk to an etcd, and whom it talks to: passwords and certificates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import AuthenticationError, ConfigurationError, StoreError
from shoal.store.etcd.gateway import Gateway
from shoal.store.etcd.store import EtcdStore
from shoal.store.external.tls import tls_context
from tests.support.certificates import keys
from tests.support.etcd_server import EtcdServer, needs_etcd
from tests.support.waiting import until

from .conformance import in_background

__all__ = ["keys"]  # a fixture

pytestmark = needs_etcd

PASSWORD = "pass word/@:?"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd where user ``ranks`` may touch what jobs of shoal write, and nothing else."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        for name in ("root", "ranks", "stranger"):
            server.ask("auth/user/add", name=name, password=PASSWORD)
            server.ask("auth/role/add", name=name)
            server.ask("auth/user/grant", user=name, role=name)
        mine = {"permType": "READWRITE", "key": b"/shoal/", "range_end": b"/shoal0"}
        server.ask("auth/role/grant", name="ranks", perm=mine)
        server.ask("auth/enable")
        yield server


@pytest.fixture
def store(guarded: EtcdServer) -> Iterator[EtcdStore]:
    with EtcdStore([guarded.address], user="ranks", password=PASSWORD, timeout=60) as store:
        yield store


def test_a_role_with_the_prefix_alone_is_enough(store: EtcdStore) -> None:
    with in_background() as call, store.clone() as other:
        waiting = call(other.get, "key")
        until(lambda: other._backing._streams)
        store.set("key", b"value")
        assert waiting.result(30) == b"value"
    assert store.add("counter", 2) == 2
    assert store._backing.job._keep_once(store._backing.job.lease, store._deadline(60))
    assert store.delete_prefix("") == 2


def test_a_token_that_has_ended_is_renewed(store: EtcdStore) -> None:
    gateway = store._backing.job.client
    for lost in (None, "unknown.1"):
        gateway._token = lost
        store.set("key", b"value")
        gateway._token = lost
        with in_background() as call:
            waiting = call(store.wait, ["key", "other"])
            until(lambda: store._backing._streams)
            store.set("other", b"")
            waiting.result(30)
        store.delete("other")


def test_a_wrong_password_is_named_and_not_shown(guarded: EtcdServer) -> None:
    with pytest.raises(AuthenticationError, match="does not accept user 'ranks' with this") as raised:
        EtcdStore([guarded.address], user="ranks", password="guess", timeout=60)
    assert "guess" not in str(raised.value)


def test_an_etcd_that_asks_for_a_user_is_named(guarded: EtcdServer) -> None:
    with pytest.raises(AuthenticationError, match="asks for user and password: set SHOAL_STORE_USER and"):
        EtcdStore([guarded.address], timeout=60)


def test_a_user_who_may_not_write_here_is_named(guarded: EtcdServer) -> None:
    with pytest.raises(StoreError, match="user 'stranger' lacks permission: permission denied"):
        EtcdStore([guarded.address], user="stranger", password=PASSWORD, timeout=60)


def test_a_password_that_was_changed_meanwhile_is_an_error_of_the_store(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = store._backing.job.client
    gateway._token, gateway._password = None, "old"
    with pytest.raises(StoreError, match="does not accept user 'ranks'"):
        store.set("key", b"")


def test_an_etcd_without_users_takes_everyone(tmp_path: Path) -> None:
    with (
        EtcdServer(tmp_path) as server,
        EtcdStore([server.address], user="ranks", password=PASSWORD, timeout=60) as store,
    ):
        store.set("key", b"")


# -- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encrypted(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd that talks only to clients with a certificate of its own authority."""
    with EtcdServer(
        tmp_path_factory.mktemp("etcd"), "only", None, "--cert-file", str(keys / "server.pem"),
        "--key-file", str(keys / "server.key"), "--trusted-ca-file", str(keys / "ca.pem"),
        "--client-cert-auth", scheme="https",
    ) as server:  # fmt: skip
        yield server


def test_certificates_of_an_authority_of_ones_own(encrypted: EtcdServer, keys: Path) -> None:
    tls = tls_context(*(str(keys / name) for name in ("ca.pem", "client.pem", "client.key")))
    with EtcdStore([encrypted.address], tls=tls, timeout=60) as store, in_background() as call:
        other = store.clone()
        waiting = call(other.get, "key")
        until(lambda: other._backing._streams)
        store.set("key", bytes(2**20))
        assert waiting.result(30) == bytes(2**20)
        waiting = call(other.get, "never")
        until(lambda: other._backing._streams)
        other.close()
        with pytest.raises(StoreError, match="has been closed"):
            waiting.result(30)


def test_a_side_that_the_other_does_not_trust_is_named(encrypted: EtcdServer, keys: Path) -> None:
    with pytest.raises(AuthenticationError, match=r"certificate of etcd at 127.*ca= in the URL"):
        EtcdStore([encrypted.address], tls=tls_context(None, None, None), timeout=60)
    with pytest.raises(
        AuthenticationError, match=r"requires a client certificate of its own authority.*cert= and key="
    ):
        EtcdStore([encrypted.address], tls=tls_context(str(keys / "ca.pem"), None, None), timeout=60)


def test_plain_against_tls_is_named(encrypted: EtcdServer, guarded: EtcdServer, keys: Path) -> None:
    with pytest.raises(StoreError, match="uses TLS: use etcds:// instead of etcd://"):
        EtcdStore([encrypted.address], timeout=60)
    with pytest.raises(StoreError, match="does not use TLS: use etcd:// instead of etcds://"):
        EtcdStore([guarded.address], tls=tls_context(str(keys / "ca.pem"), None, None), timeout=60)


def test_files_that_cannot_be_used_are_named(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ca=.*nothing: no certificates.*No such file"):
        tls_context(str(tmp_path / "nothing"), None, None)
    with pytest.raises(ConfigurationError, match=r"cert=.*no certificate with its key"):
        tls_context(None, str(keys / "client.pem"), str(keys / "server.key"))
    with pytest.raises(ConfigurationError, match=r"key=.*no certificate with its key.*No such file"):
        tls_context(None, str(keys / "client.pem"), str(tmp_path / "nothing"))
    with pytest.raises(ConfigurationError, match=r"key=.*without cert="):
        tls_context(None, None, str(keys / "server.key"))


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "urllib3", None)
    with pytest.raises(ConfigurationError, match=r"need urllib3: pip install shoal\[etcd\]"):
        Gateway(["127.0.0.1:2379"])
