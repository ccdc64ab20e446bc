"""The private file in which ranks on one host meet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shoal import ConfigurationError
from shoal.rendezvous.user_files import PrivateFile


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"shoal-{os.geteuid()}"


def test_processes_below_wrappers_derive_the_same_path() -> None:
    program = (
        "import tempfile, sys; tempfile.tempdir = sys.argv[1]\n"
        "from shoal.rendezvous.user_files import PrivateFile; print(PrivateFile('j', 'SOME_RANK').path)"
    )
    import tempfile

    run = [sys.executable, "-c", program, tempfile.gettempdir()]
    wrapper = ["sh", "-c", '"$@"; true', "wrapper", *run]  # a shell that stays between us and the rank
    paths = {
        subprocess.run(
            command, env={**os.environ, "SOME_RANK": "0"}, capture_output=True, text=True, check=True
        ).stdout
        for command in (run, wrapper)
    }
    assert len(paths) == 1
    assert f"{os.getpid()}-" in paths.pop()


def test_the_file_works_without_its_name_and_only_its_user_can_read_it(directory: Path) -> None:
    file = PrivateFile("job", "SOME_RANK")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert file.path.stat().st_mode & 0o777 == 0o600
    with file.store(1.0) as store, file.store(1.0) as other:
        file.unlink()
        file.unlink()
        assert list(directory.iterdir()) == []
        store.set("x", b"1")
        assert other.get("x") == b"1"
        with store.clone() as clone:
            assert clone.get("x") == b"1"
    file.close()


def test_only_the_file_that_all_have_met_in_loses_its_name(directory: Path) -> None:
    old = PrivateFile("job", "SOME_RANK")
    old.unlink()
    new = PrivateFile("job", "SOME_RANK")
    old.unlink()
    assert list(directory.iterdir()) == [new.path]
    old.close()
    new.close()


def test_files_of_launchers_that_are_gone_are_swept(directory: Path) -> None:
    PrivateFile("job", "SOME_RANK").close()
    (directory / "999999999-1-00000000").touch()
    PrivateFile("job", "SOME_RANK").close()
    assert len(list(directory.iterdir())) == 1


def test_a_directory_that_others_can_enter_is_refused(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    with pytest.raises(ConfigurationError, match=r"only user .* can enter"):
        PrivateFile("job", "SOME_RANK")


def test_neither_the_path_nor_the_file_moves_with_the_clock(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = PrivateFile("job", "SOME_RANK")
    of_the_day = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: of_the_day(process) + 1.0)
    after = PrivateFile("job", "SOME_RANK")
    assert after.path == before.path
    assert list(directory.iterdir()) == [before.path]
    before.close()
    after.close()


@pytest.mark.parametrize("name", ["notes", "1-2", "x-1-00000000", "1-x-00000000", "²-1-00000000"])
def test_files_of_others_are_left_alone(name: str, directory: Path) -> None:
    PrivateFile("job", "SOME_RANK").close()
    (directory / name).touch()
    PrivateFile("job", "SOME_RANK").close()
    assert (directory / name).exists()
