"""No two ranks talk without a secret: where it comes from if none was given, and who cannot get it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from shoal import (
    AuthenticationError,
    ConfigurationError,
    Membership,
    MemoryStore,
    TCPStore,
    TCPStoreServer,
)
from shoal.rendezvous import Venue, default_secret, job_record, records, user_secret
from shoal.rendezvous.membership import rendezvous_at as meet_at_place
from shoal.rendezvous.point import RendezvousPoint
from shoal.store.file import LogFile
from shoal.testing import no_leaks
from tests.support.other_user import as_nobody, needs_root
from tests.support.ports import free_port

from .together import all_well, release_all, rendezvous_at, request, together


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory that every user of the machine can enter, as /tmp is."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    monkeypatch.delenv("SHOAL_SECRET", raising=False)
    monkeypatch.delenv("SHOAL_SECRET_FILE", raising=False)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def url() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _all_meet(url: str, size: int) -> list[Membership]:
    return all_well(together(*(lambda rank=rank: rendezvous_at(url, rank, size) for rank in range(size))))


# -- the user's own --------------------------------------------------------------------------------


def test_the_secret_of_a_user_lies_where_nobody_else_can_read_it(place: Path) -> None:
    secret = user_secret()
    assert len(secret) == 64
    assert user_secret() == secret
    directory = place / f"shoal-{os.geteuid()}"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [(path.name, path.stat().st_mode & 0o777) for path in directory.iterdir()] == [("secret", 0o600)]


@pytest.mark.concurrency
def test_processes_that_ask_for_it_at_once_get_the_same() -> None:
    with no_leaks(), ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: user_secret(), range(64)))) == 1


@needs_root
def test_two_users_have_two_secrets_and_neither_can_read_the_others(place: Path) -> None:
    mine = user_secret()
    assert as_nobody(user_secret) != mine
    error = as_nobody((place / f"shoal-{os.geteuid()}" / "secret").read_bytes)
    assert isinstance(error, PermissionError)


def test_a_directory_or_file_that_others_prepared_is_refused(place: Path) -> None:
    directory = place / f"shoal-{os.geteuid()}"
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(ConfigurationError, match=r"only user .* can enter"):
        user_secret()
    directory.chmod(0o700)
    (directory / "secret").symlink_to(place / "elsewhere")
    with pytest.raises(ConfigurationError, match="symbolic link"):
        user_secret()
    assert not (place / "elsewhere").exists()


def test_where_no_secret_can_be_kept_the_message_says_how_to_set_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = r"`shoal run`, or .*SHOAL_SECRET=\$\(openssl rand -hex 16\)"
    monkeypatch.setattr("tempfile.tempdir", str(place / "absent"))
    with pytest.raises(ConfigurationError, match=advice):
        user_secret()
    monkeypatch.setattr("tempfile.tempdir", str(place))

    def full(self: LogFile, payload: bytes) -> None:
        raise records.StoreError("cannot write: no space left on device")

    monkeypatch.setattr(LogFile, "append", full)
    with pytest.raises(ConfigurationError, match=rf"no space left on device; .*{advice}"):
        user_secret()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_on_loopback_it_takes_the_place_of_one_that_is_given(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_secret(host) == user_secret()
    assert default_secret("192.0.2.7") == default_secret("no.such.host.invalid") == b""
    monkeypatch.setenv("SHOAL_SECRET", "given")
    assert default_secret(host) == default_secret("192.0.2.7") == b"given"


# -- tcp -------------------------------------------------------------------------------------------


def test_over_loopback_a_job_without_a_secret_uses_its_users(url: str) -> None:
    with no_leaks():
        members = _all_meet(url, 2)
        assert {member.secret for member in members} == {user_secret()}
        with pytest.raises(AuthenticationError):
            TCPStore("127.0.0.1", _port(url), b"", timeout=20)
        release_all(members)


@needs_root
def test_another_user_cannot_be_a_rank(url: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(rendezvous_at, url, 0, 2)
        error = as_nobody(lambda: rendezvous_at(url, 1, 2))
        assert isinstance(error, AuthenticationError)
        assert "the store was started by another user" in str(error)
        second = rendezvous_at(url, 1, 2)
        release_all([first.result(30), second])


@needs_root
def test_a_store_that_another_user_serves_at_the_place_is_refused(url: str) -> None:
    done_in, done_out = os.pipe()
    ready_in, ready_out = os.pipe()

    def serve() -> None:
        with TCPStoreServer("127.0.0.1", _port(url), user_secret()):
            os.write(ready_out, b"x")
            os.read(done_in, 1)

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(as_nobody, serve)
        os.read(ready_in, 1)
        with pytest.raises(
            AuthenticationError, match=r"the store was started by another user.*SHOAL_SECRET=\$\(openssl"
        ):
            rendezvous_at(url, 0, 2)
        os.write(done_out, b"x")
        assert serving.result(30) is None
    for fd in (done_in, done_out, ready_in, ready_out):
        os.close(fd)


def test_a_store_with_no_secret_at_all_is_no_place_for_several_ranks() -> None:
    with (
        TCPStoreServer(records=job_record(2)) as server,
        pytest.raises(AuthenticationError, match="was given no secret, so it used the one"),
    ):
        rendezvous_at(server.url)


# -- places that say nothing of a secret ----------------------------------------------------------


def _meet_in(store: MemoryStore, rank: int, secret: bytes = b"") -> Membership:
    venue = Venue(store.clone(), rank, 2, job="job", epoch=0)
    return meet_at_place(RendezvousPoint.at(venue, request(secret=secret)))


def test_ranks_of_one_machine_use_their_users_whatever_the_place() -> None:
    with MemoryStore() as store:
        members = all_well(together(lambda: _meet_in(store, 0), lambda: _meet_in(store, 1)))
        assert {member.secret for member in members} == {user_secret()}
        release_all(members)


def test_ranks_of_several_machines_are_refused_without_one() -> None:
    def come(store: MemoryStore) -> None:
        elsewhere = records.MemberDescription("another/machine", "pid:[1]/1/1.5", "h", True, "t")
        store.set("job/0/0/rank/0", msgspec.json.encode(elsewhere))
        store.add("job/0/0/came", 1)

    with MemoryStore() as store:
        come(store)
        with pytest.raises(ConfigurationError, match=r"several hosts .* no secret: .*openssl rand"):
            _meet_in(store, 1)
    with MemoryStore() as store:
        come(store)
        member = _meet_in(store, 1, b"given")
        assert member.secret == b"given"
        member.release(1.0)


def test_a_group_of_one_needs_none() -> None:
    member = rendezvous_at("env://", environ={})
    assert (member.size, member.secret) == (1, b"")
    member.release(1.0)
