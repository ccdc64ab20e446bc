"""Several worlds in one process, and the names that tell them apart."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.rendezvous import rendezvous, schemes
from shoal.testing import no_leaks
from tests.support.starts import SECRET, End, Start, place, served

from .together import rendezvous_at


@pytest.mark.parametrize("way", ["tcp", "file", "launched", "torchrun", "torch_tcp", "torch_file"])
def test_a_process_can_be_in_two_worlds_at_one_place_and_close_either(way: str, tmp_path: Path) -> None:
    where = place(way, tmp_path)
    with served(way, where, 2), Start(way, where, 2, leave="two worlds") as start:
        assert start.ends() == [End(0)] * 2


@pytest.mark.parametrize("way", ["tcp", "file"])
def test_a_second_world_of_the_same_name_is_told_to_take_another(way: str, tmp_path: Path) -> None:
    url = f"{way}://{place(way, tmp_path)}"
    with no_leaks(), shoal.init(url, rank=0, size=1, secret=SECRET):
        with pytest.raises(
            shoal.RendezvousError,
            match=r"rank 0 is given twice: .* It is this process itself: .* shoal.init\(job=...\)",
        ):
            shoal.init(url, rank=0, size=1, secret=SECRET)
        with shoal.init(url, rank=0, size=1, secret=SECRET, job="second") as second:
            assert second.size == 1


def test_the_server_of_two_worlds_goes_with_the_last_of_them(tmp_path: Path) -> None:
    where = place("tcp", tmp_path)
    with no_leaks():
        for last in (0, 1):
            worlds = [
                shoal.init(f"tcp://{where}", rank=0, size=1, secret=SECRET, job=job) for job in ("a", "b")
            ]
            worlds[1 - last].close()
            worlds[last].store.set("x", b"1")
            worlds[last].close()
            with pytest.raises(shoal.RendezvousTimeout):
                rendezvous(f"tcp://{where}", rank=1, size=2, secret=SECRET, timeout=0.1)


def test_a_world_with_another_secret_is_refused_by_the_server_of_the_first(tmp_path: Path) -> None:
    url = f"tcp://{place('tcp', tmp_path)}"
    with no_leaks(), shoal.init(url, rank=0, size=1, secret=SECRET) as first:
        with pytest.raises(shoal.AuthenticationError):
            shoal.init(url, rank=0, size=1, secret="another", job="second")
        first.store.set("x", b"1")


def test_a_child_that_is_forked_while_a_server_is_looked_for_can_meet(tmp_path: Path) -> None:
    url = f"tcp://{place('tcp', tmp_path)}"
    with schemes._lock:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(30)
                with shoal.init(url, rank=0, size=1, secret=SECRET):
                    code = 0
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "job", ["", " \n", "a\nb", "a\0b", "\ud800", "\x1b[31m", "x" * 257, "ü" * 129, 7, b"x"]
)
def test_what_cannot_name_a_job_is_refused(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(shoal.UsageError, match=r"job=.*: expected 1 to 256 bytes of printable text"):
        shoal.init(job=job)
    if isinstance(job, str) and job.strip() and "\0" not in job and job != "\ud800":
        monkeypatch.setenv("SHOAL_JOB", job)
        with pytest.raises(shoal.ConfigurationError, match=r"SHOAL_JOB=.*: expected 1 to 256 bytes"):
            shoal.init()


@pytest.mark.parametrize("job", ["..", "a/0", "50%", "ü" * 128, "{job}", "a b", "*"])
def test_any_other_text_names_a_job_of_its_own(job: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meet"
    with shoal.init(url, rank=0, size=1) as plain, shoal.init(url, rank=0, size=1, job=job) as named:
        named.store.set("x", job)
        assert not plain.store.check(["x"])
    with shoal.init(url, rank=0, size=1, job=job):
        pass  # the name is free again


def test_local_ranks_of_the_launcher_do_not_hold_for_other_ranks(tmp_path: Path) -> None:
    environ = {"SHOAL_RANK": "1", "SHOAL_SIZE": "2", "SHOAL_LOCAL_RANK": "1", "SHOAL_LOCAL_SIZE": "2"}
    environ["SHOAL_STORE"] = f"file://{tmp_path}/meet"
    member = rendezvous_at("env://", 0, 1, environ=environ)
    assert (member.rank, member.size, member.local_rank, member.local_size) == (0, 1, 0, 1)
    member.release(1.0)
