"""``--tls``: jobs and stores whose connections are encrypted."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from shoal.errors import AuthenticationError, VersionMismatch
from shoal.store import open_store
from tests.support.certificates import Authority, use_certificates
from tests.support.ports import free_port

from .conftest import Workshop

#: whether a store that is not encrypted would be reached where the ranks have met
REFUSED = """
import os
from shoal.errors import VersionMismatch
from shoal.store import open_store
os.environ["SHOAL_TLS"] = "0"
try:
    open_store(os.environ["SHOAL_STORE"], secret=os.environ["SHOAL_SECRET"].encode(), timeout=30).close()
except VersionMismatch:
    print("encrypted")
"""
#: ranks that connect, and add something up
JOB = """
import shoal, torch
group = shoal.init()
x = torch.ones(3)
group.all_reduce(x).wait()
group.close()
assert x.tolist() == [2, 2, 2]
"""
#: ranks that only meet
MEETING = """
import sys
from shoal.rendezvous import rendezvous
given = zip(("rank", "size"), map(int, sys.argv[2:]))
membership = rendezvous(*sys.argv[1:2], **dict(given))
membership.release(30.0)
"""


def test_ranks_of_a_job_with_tls_meet_in_a_store_that_is_encrypted(workshop: Workshop) -> None:
    (workshop.path / "job.py").write_text(JOB + REFUSED)
    code, out, err = workshop.end(workshop.shoal("run", "--tls", "-n", "2", "job.py"))
    assert (code, err) == (0, b"")
    assert sorted(out.splitlines()) == [b"[0] encrypted", b"[1] encrypted"]


def test_without_the_option_it_is_not_encrypted(workshop: Workshop) -> None:
    (workshop.path / "job.py").write_text(MEETING + REFUSED)
    assert workshop.end(workshop.shoal("run", "-n", "2", "job.py")) == (0, b"", b"")


def test_ranks_that_serve_their_own_store_encrypt_it(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 serves it: no launcher."""
    url = f"tcp://127.0.0.1:{free_port()}"
    monkeypatch.setenv("SHOAL_TLS", "1")
    monkeypatch.setenv("SHOAL_SECRET", "of the job")
    (workshop.path / "rank.py").write_text(MEETING)
    ranks = [workshop.start_process([sys.executable, "rank.py", url, "0", "2"])]
    with monkeypatch.context() as plain:
        plain.setenv("SHOAL_TLS", "0")
        with pytest.raises(VersionMismatch):
            open_store(url, secret=b"of the job", timeout=30)
    ranks.append(workshop.start_process([sys.executable, "rank.py", url, "1", "2"]))
    for rank in ranks:
        assert workshop.end(rank) == (0, b"", b"")


def test_a_rank_without_tls_does_not_meet_those_with_it_and_says_why(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_SECRET", "of the job")
    (workshop.path / "rank.py").write_text(MEETING)
    host = workshop.shoal("store", "--tls", "--size", "1")
    assert host.stdout is not None
    url = host.stdout.readline().decode().split()[-1]
    code, _, err = workshop.end(workshop.start_process([sys.executable, "rank.py", url]))
    assert code == 1
    assert b"VersionMismatch" in err.splitlines()[-1]
    assert b"set SHOAL_TLS=1 for every process" in err
    host.send_signal(signal.SIGTERM)
    workshop.end(host)


@pytest.mark.parametrize("log", [False, True])
def test_a_store_with_tls_serves_those_who_encrypt(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: bool
) -> None:
    monkeypatch.setenv("SHOAL_SECRET", "of the job")
    host = workshop.shoal("store", "--tls", *(["--log", str(tmp_path / "log")] if log else []))
    assert host.stdout is not None
    url = host.stdout.readline().decode().split()[-1]
    with pytest.raises(VersionMismatch, match="set SHOAL_TLS=1"):
        open_store(url, secret=b"of the job", timeout=30)
    monkeypatch.setenv("SHOAL_TLS", "1")
    with open_store(url, secret=b"of the job", timeout=30) as store:
        store.set("key", b"value")
        assert store.get("key") == b"value"
    with pytest.raises(AuthenticationError):
        open_store(url, secret=b"another", timeout=30)
    host.send_signal(signal.SIGTERM)
    assert workshop.end(host) == (0, b"", b"")


def test_a_job_in_a_named_store_with_certificates_of_an_authority(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    use_certificates(monkeypatch, authority, authority.issue("everybody"))
    monkeypatch.setenv("SHOAL_SECRET", "of the job")
    host = workshop.shoal("store")
    assert host.stdout is not None
    url = host.stdout.readline().decode().split()[-1]
    (workshop.path / "job.py").write_text(MEETING + REFUSED)
    code, out, err = workshop.end(workshop.shoal("run", "-n", "2", "--store", url, "job.py"))
    assert (code, err) == (0, b"")
    assert out.count(b"encrypted") == 2
    # The key stays where it is: the ranks are told its path.
    monkeypatch.setenv("SHOAL_TLS_KEY", str(tmp_path / "nothing"))
    code, out, err = workshop.end(workshop.shoal("run", "-n", "2", "--store", url, "job.py"))
    assert (code, out, err.count(b"\n")) == (2, b"", 1)
    assert b"SHOAL_TLS_KEY=" in err
    host.send_signal(signal.SIGTERM)
    assert workshop.end(host) == (0, b"", b"")


@pytest.mark.parametrize("command", [["run", "--tls", "true"], ["store", "--tls"]])
def test_what_is_missing_for_tls_is_one_line_and_code_2(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    (workshop.path / "cryptography.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(workshop.path) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    code, out, err = workshop.end(workshop.shoal(*command))
    assert (code, out, err.count(b"\n")) == (2, b"", 1)
    assert b"pip install 'shoal[tls]'" in err


def test_settings_that_are_not_whole_are_one_line_and_code_2(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TLS_CA", "ca.pem")
    for command in (["run", "--tls", "true"], ["store", "--tls"]):
        code, out, err = workshop.end(workshop.shoal(*command))
        assert (code, out, err.count(b"\n")) == (2, b"", 1)
        assert b"SHOAL_TLS_CA set without the others" in err


def test_a_dry_run_shows_the_variable(workshop: Workshop) -> None:
    code, out, _ = workshop.end(workshop.shoal("run", "--tls", "--dry-run", "true"))
    assert code == 0
    assert b"  SHOAL_TLS=1\n" in out


def test_a_store_that_it_cannot_encrypt_is_refused(workshop: Workshop) -> None:
    code, out, err = workshop.end(workshop.shoal("run", "--tls", "--store", "etcd://127.0.0.1:2379", "true"))
    assert (code, out, err.count(b"\n")) == (2, b"", 1)
    assert b"store: use etcds:// in" in err
