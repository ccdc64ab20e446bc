"""Files that appear complete or not at all, and the left-overs of killed writers."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoal.common.atomic_file import AtomicFile

WRITER = """
import sys, time
from shoal.common.atomic_file import AtomicFile
draft = AtomicFile(sys.argv[1])
draft.file.write(b"half of it")
draft.file.flush()
print("written", flush=True)
time.sleep(60)
"""


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_the_target_appears_with_the_call_of_replace(tmp_path: Path) -> None:
    with AtomicFile(tmp_path / "a", mode=0o600) as draft:
        draft.file.write(b"new")
        assert "a" not in _names(tmp_path)
        draft.replace(durable=True)
    assert _names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def test_nothing_is_left_of_a_file_that_was_not_finished(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with AtomicFile(tmp_path / "a") as draft:
        draft.file.write(b"new")
    assert _names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_errors_name_the_target(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none/a'"):
        AtomicFile(tmp_path / "none" / "a")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"), AtomicFile(tmp_path / "folder") as draft:
        draft.replace()
    with pytest.raises(OSError, match=r"No space left on device: '.*/a'"), AtomicFile(tmp_path / "a"):
        raise OSError(28, "No space left on device")
    assert _names(tmp_path) == ["folder"]


def test_threads_that_write_the_same_target_do_not_disturb_each_other(tmp_path: Path) -> None:
    def write(letter: bytes) -> None:
        for _ in range(50):
            with AtomicFile(tmp_path / "a") as draft:
                draft.file.write(letter * 10_000)
                draft.replace()
            found = (tmp_path / "a").read_bytes()
            wrong.extend([] if len(set(found)) == 1 and len(found) == 10_000 else [found])

    wrong: list[bytes] = []
    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"x", b"y", b"z")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert _names(tmp_path) == ["a"]


def test_a_link_at_the_target_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"other")
    (tmp_path / "a").symlink_to(tmp_path / "other")
    with AtomicFile(tmp_path / "a") as draft:
        draft.file.write(b"new")
        draft.replace()
    assert (tmp_path / "other").read_bytes() == b"other"
    assert not (tmp_path / "a").is_symlink()


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    name = "ä" * 127
    with AtomicFile(tmp_path / name) as draft:
        draft.replace()
    assert _names(tmp_path) == [name]


def test_the_left_over_of_a_killed_writer_is_deleted_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "a")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        (left,) = _names(tmp_path)
        with AtomicFile(tmp_path / "b") as draft:
            draft.replace()
        assert _names(tmp_path) == [left, "b"]
        writer.send_signal(signal.SIGKILL)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.write_bytes(b"")
    link = tmp_path / f".a.{'0' * 16}.shoal-part"
    link.symlink_to(outside)
    with AtomicFile(tmp_path / "b") as draft:
        draft.replace()
    assert _names(tmp_path) == sorted([link.name, "b"])  # nobody's temporary file is a link
    assert outside.exists()


def test_only_files_and_links_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, why in (("pipe", "it is not a regular file"), ("folder", "it is a directory")):
        with pytest.raises(OSError, match=why) as raised:
            AtomicFile(tmp_path / name)
        assert raised.value.filename == str(tmp_path / name)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "pipe"]
