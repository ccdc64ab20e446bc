"""Certificates of an authority of one's own: who has no right one is refused, and both sides hear it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import config
from shoal.errors import AuthenticationError, ConfigurationError, StoreError
from shoal.net import Connection
from shoal.store import TCPStore, TCPStoreServer
from tests.store.test_lost_connections import cut
from tests.support.certificates import Authority, Pair, use_certificates
from tests.support.waiting import until

from .echo import SECRET, EchoServer, connect_echo, echoes
from .relay import Relay

AT_ONCE = 20.0
_VARIABLES = ("SHOAL_TLS", "SHOAL_TLS_CA", "SHOAL_TLS_CERT", "SHOAL_TLS_KEY")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("theirs"), "foreign")


@pytest.fixture(scope="module")
def ours(authority: Authority) -> Pair:
    return authority.issue("server")


@pytest.fixture
def server(authority: Authority, ours: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[EchoServer]:
    use_certificates(monkeypatch, authority, ours)
    with EchoServer() as server:
        yield server


def _without_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _VARIABLES[1:]:
        monkeypatch.delenv(name)


def test_both_sides_with_certificates_of_one_authority_agree(
    server: EchoServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_certificates(monkeypatch, authority, authority.issue("client"))
    echoes(server.port)
    with pytest.raises(AuthenticationError, match="secret"):
        connect_echo(server.port, b"wrong")  # a certificate is not the secret
    assert server.accepted == 1


def test_names_in_certificates_are_not_compared(
    server: EchoServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is for 127.0.0.1, and this one is reached as localhost."""
    from shoal.net import connect

    with connect("localhost", server.port, secret=SECRET, purpose="echo", timeout=60):
        pass


def _refusal(server: EchoServer) -> AuthenticationError:
    """The error of a client, which comes at once; nobody is let in."""
    begun = time.monotonic()
    with pytest.raises(AuthenticationError) as raised:
        connect_echo(server.port)
    assert time.monotonic() - begun < AT_ONCE
    assert server.accepted == 0
    return raised.value


@pytest.mark.parametrize("time_", range(5))
def test_a_client_without_a_certificate_is_told_what_to_set(
    server: EchoServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    time_: int,
) -> None:
    caplog.set_level("INFO")
    _without_certificates(monkeypatch)
    assert "set SHOAL_TLS_CA, SHOAL_TLS_CERT and SHOAL_TLS_KEY for every process" in str(_refusal(server))
    until(lambda: "the other side shows no certificate" in caplog.text)


def test_a_client_whose_certificate_another_authority_has_signed_is_refused(
    server: EchoServer,
    authority: Authority,
    foreign: Authority,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    use_certificates(monkeypatch, authority, foreign.issue("client"))
    assert "refuses the certificate of this process" in str(_refusal(server))
    until(lambda: "the certificate of the other side is refused: " in caplog.text)


def test_a_client_whose_certificate_has_expired_is_refused(
    server: EchoServer,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    use_certificates(monkeypatch, authority, authority.issue("late", expired=True))
    assert "certificate expired" in str(_refusal(server))
    until(lambda: "certificate has expired" in caplog.text)


@pytest.mark.parametrize("what", ["of another authority", "expired", "made at the start"])
def test_a_server_whose_certificate_is_not_right_is_refused(
    what: str, authority: Authority, foreign: Authority, ours: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {
        "of another authority": "unable to get local issuer certificate",
        "expired": "certificate has expired",
        "made at the start": "self-signed certificate",
    }
    if what == "expired":
        use_certificates(monkeypatch, authority, authority.issue("old", expired=True))
    elif what == "of another authority":
        use_certificates(monkeypatch, authority, foreign.issue("server"))
    else:
        monkeypatch.setenv("SHOAL_TLS", "1")
    with EchoServer() as server:
        use_certificates(monkeypatch, authority, ours)
        error = str(_refusal(server))
    assert expected[what] in error
    assert "signed by the authority in SHOAL_TLS_CA" in error


def test_who_holds_a_right_certificate_but_not_the_secret_gains_nothing_in_between(
    server: EchoServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_certificates(monkeypatch, authority, authority.issue("insider"))
    with Relay(server.port, terminates=True) as relay:
        with pytest.raises(AuthenticationError, match="there is a man in the middle"):
            connect_echo(relay.port)
        assert relay.terminated == 1
    assert server.accepted == 0


def test_certificates_that_were_renewed_are_used_for_new_connections(
    server: EchoServer, authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old, new = authority.issue("old", expired=True), authority.issue("new")
    pair = Pair(tmp_path / "cert.pem", tmp_path / "key.pem")
    use_certificates(monkeypatch, authority, pair)
    for path, content in zip(pair, old, strict=True):
        path.write_bytes(content.read_bytes())
    with pytest.raises(AuthenticationError):
        connect_echo(server.port)
    for path, content in zip(pair, new, strict=True):
        path.write_bytes(content.read_bytes())
    echoes(server.port)


def test_a_store_says_at_once_why_it_does_not_connect(
    authority: Authority, foreign: Authority, ours: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_certificates(monkeypatch, authority, ours)
    with (
        TCPStoreServer(secret=SECRET) as server,
        TCPStore("127.0.0.1", server.port, SECRET, timeout=60) as store,
    ):
        store.set("key", b"value")
        use_certificates(monkeypatch, foreign, foreign.issue("client"))
        begun = time.monotonic()
        with pytest.raises(AuthenticationError, match="SHOAL_TLS_CA"):
            TCPStore("127.0.0.1", server.port, SECRET, timeout=60)
        cut(server)
        with pytest.raises(StoreError, match=r"lost the store at .*SHOAL_TLS_CA"):
            store.get("key")
        assert time.monotonic() - begun < AT_ONCE


def _connect_nowhere() -> Connection:
    """The files are looked at before anything is said."""
    with EchoServer() as server:
        return connect_echo(server.port)


def test_files_that_cannot_be_used_are_named(
    authority: Authority, ours: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nothing, empty, protected = tmp_path / "nothing", tmp_path / "empty", tmp_path / "protected.key"
    empty.write_text("no PEM")
    protected.write_bytes(_with_password(ours.key.read_bytes()))
    other = authority.issue("other")
    for name, path, message in (
        ("SHOAL_TLS_CA", nothing, r"SHOAL_TLS_CA='.*nothing' cannot be read: No such file"),
        ("SHOAL_TLS_CA", empty, r"SHOAL_TLS_CA='.*empty' no certificates, in PEM"),
        ("SHOAL_TLS_CERT", nothing, r"SHOAL_TLS_CERT='.*nothing' cannot be read"),
        ("SHOAL_TLS_CERT", empty, r"SHOAL_TLS_CERT='.*empty' .*no certificate"),
        ("SHOAL_TLS_KEY", nothing, r"SHOAL_TLS_KEY='.*nothing' cannot be read"),
        ("SHOAL_TLS_KEY", empty, r"SHOAL_TLS_KEY='.*empty': no certificate with its key"),
        ("SHOAL_TLS_KEY", other.key, r"no certificate with its key.*mismatch"),
        ("SHOAL_TLS_KEY", protected, r"no certificate with its key, without a password"),
    ):
        use_certificates(monkeypatch, authority, ours)
        monkeypatch.setenv(name, str(path))
        with pytest.raises(ConfigurationError, match=message):
            _connect_nowhere()


def test_a_client_whose_files_cannot_be_used_says_so(
    server: EchoServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHOAL_TLS_CA", str(tmp_path / "nothing"))
    with pytest.raises(ConfigurationError, match="SHOAL_TLS_CA"):
        connect_echo(server.port)


def _with_password(key: bytes) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"SHOAL_TLS": "1", "SHOAL_TLS_CA": "ca"}, "SHOAL_TLS_CA set without the others of SHOAL_TLS_CA, S"),
        ({"SHOAL_TLS": "1", "SHOAL_TLS_CERT": "c", "SHOAL_TLS_KEY": "k"}, "SHOAL_TLS_CERT, SHOAL_TLS_KEY se"),
        (dict.fromkeys(_VARIABLES[1:], "x"), "but SHOAL_TLS is not: set it to 1 for encryption"),
    ],
)  # fmt: skip
def test_settings_that_are_not_whole_are_named(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config.check_variables(given)


def test_certificates_that_are_switched_off_are_no_mistake() -> None:
    config.check_variables({"SHOAL_TLS": "0", **dict.fromkeys(_VARIABLES[1:], "x")})


def test_nothing_is_asked_at_the_terminal(authority: Authority, ours: Pair, tmp_path: Path) -> None:
    """OpenSSL asks for the password of a key unless it is told not to."""
    key = tmp_path / "protected.key"
    key.write_bytes(_with_password(ours.key.read_bytes()))
    environ = {
        **os.environ,
        "SHOAL_TLS": "1",
        "SHOAL_TLS_CA": str(authority.ca),
        "SHOAL_TLS_CERT": str(ours.cert),
        "SHOAL_TLS_KEY": str(key),
    }
    code = "from shoal.store import TCPStoreServer; TCPStoreServer(secret=b'x')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    assert done.returncode == 1
    assert "ConfigurationError" in done.stderr
    assert "pass phrase" not in done.stderr
