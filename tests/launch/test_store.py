"""``shoal store``: a store by itself."""

from __future__ import annotations

import re
import resource
import signal
from pathlib import Path

import pytest

from shoal.errors import AuthenticationError, StoreError
from shoal.rendezvous import job_record, rendezvous, user_secret
from shoal.store import open_store
from tests.support.ports import free_port

from .conftest import Workshop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_store_prints_its_address_serves_and_ends_on_a_signal(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("SHOAL_SECRET", "of the job")
    host = workshop.shoal("store", "--listen", "127.0.0.1:0", "--size", "3")
    assert host.stdout is not None
    line = host.stdout.readline().decode()
    assert line.startswith("shoal store: tcp://127.0.0.1:")
    with open_store(line.split()[-1], secret=b"of the job", timeout=30) as store:
        for key, value in job_record(3).items():
            assert store.get(key) == value
        host.send_signal(number)
        assert workshop.end(host) == (0, b"", b"")


def test_without_a_secret_it_serves_its_user_alone(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SHOAL_SECRET", raising=False)
    monkeypatch.delenv("SHOAL_SECRET_FILE", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    host = workshop.shoal("store", "--size", "1")
    assert host.stdout is not None
    url = host.stdout.readline().decode().split()[-1]
    with pytest.raises(AuthenticationError):
        open_store(url, timeout=30)
    with open_store(url, secret=user_secret(), timeout=30) as store:
        assert store.num_keys() > 0
    membership = rendezvous(url, timeout=30)  # it needs no more than the address
    assert membership.size == 1
    membership.release(10.0)
    host.send_signal(signal.SIGTERM)
    assert workshop.end(host) == (0, b"", b"")
    monkeypatch.setattr("tempfile.tempdir", None)


def test_beyond_loopback_a_store_needs_a_secret_and_says_how_to_set_one(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_SECRET", raising=False)
    monkeypatch.delenv("SHOAL_SECRET_FILE", raising=False)
    code, out, err = workshop.end(workshop.shoal("store", "--listen", "0.0.0.0:0"))
    assert (code, out) == (2, b"")
    assert b"SHOAL_SECRET" in err
    assert err.count(b"\n") == 1


def test_a_port_that_is_taken_is_one_line_and_code_2(workshop: Workshop) -> None:
    first = workshop.shoal("store")
    assert first.stdout is not None
    address = first.stdout.readline().decode().rpartition("/")[2].strip()
    code, _, err = workshop.end(workshop.shoal("store", "--listen", address))
    assert code == 2
    assert address.encode() in err
    assert err.count(b"\n") == 1


def test_a_store_with_a_log_goes_on_after_it_was_killed(workshop: Workshop, tmp_path: Path) -> None:
    arguments = ["--log", str(tmp_path / "log"), "--size", "3"]
    host = workshop.shoal("store", "--listen", f"127.0.0.1:{free_port()}", *arguments)
    assert host.stdout is not None
    url = host.stdout.readline().decode().split()[-1]
    with open_store(url, secret=user_secret(), timeout=60) as store:
        store.set("key", b"value")
        code, _, err = workshop.end(workshop.shoal("store", "--log", arguments[1]))
        assert (code, err.count(b"\n")) == (2, 1)
        assert f"(process {host.pid})".encode() in err
        host.kill()
        workshop.end(host)
        again = workshop.shoal("store", "--listen", url.removeprefix("tcp://"), *arguments)
        assert again.stdout is not None
        assert again.stdout.readline() == f"shoal store: {url}\n".encode()
        assert store.get("key") == b"value"
        again.send_signal(signal.SIGTERM)
        assert workshop.end(again) == (0, b"", b"")


def test_a_store_without_room_for_its_log_refuses_changes_until_there_is_some(
    workshop: Workshop, tmp_path: Path
) -> None:
    host = workshop.shoal("store", "--listen", f"127.0.0.1:{free_port()}", "--log", str(tmp_path / "log"))
    assert host.stdout is not None
    url = host.stdout.readline().decode().split()[-1]
    with open_store(url, secret=user_secret(), timeout=60) as store:
        store.set("key", b"before")
        soft, hard = resource.prlimit(host.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(host.pid, resource.RLIMIT_FSIZE, (10_000, hard))
        with pytest.raises(
            StoreError, match="not done: the store's log could not be written: File too large"
        ):
            store.set("key", b"x" * 20_000)
        assert store.get("key") == b"before"
        store.append("key", b" and after")
        resource.prlimit(host.pid, resource.RLIMIT_FSIZE, (soft, hard))
        store.set("long", b"x" * 20_000)
        host.kill()
        workshop.end(host)
        workshop.shoal("store", "--listen", url.removeprefix("tcp://"), "--log", str(tmp_path / "log"))
        assert store.multi_get(["key", "long"]) == [b"before and after", b"x" * 20_000]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["--store", "redis://h", "--size", "2", "--listen", "h:1"],
            "--listen and --log apply to a store that this",
        ),
        (["--store", "redis://u:pass@h"], "and --size, the number of ranks"),
        (
            ["--store", "tcp://u:pass@h:1", "--size", "2"],
            r"expected an external store \(etcd://, .*rediss://",
        ),
        (["--store", "redis://u:pass@h", "--size", "2"], "needs a secret"),
    ],
)
def test_a_record_in_another_store_needs_all_that_it_takes(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, arguments: list[str], why: str
) -> None:
    monkeypatch.delenv("SHOAL_SECRET", raising=False)
    monkeypatch.delenv("SHOAL_SECRET_FILE", raising=False)
    code, out, err = workshop.end(workshop.shoal("store", *arguments))
    assert code != 0
    assert out == b""
    assert re.search(why, " ".join(err.decode().split())), err
    assert b"pass@" not in err
