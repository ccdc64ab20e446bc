"""The file of a durable store: what a killed server leaves is cut off, what damage leaves is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.errors import StoreError
from shoal.store.tcp.journal import _MAGIC, Journal, Snapshot
from shoal.store.tcp.replies import LastWrite

SNAPSHOT = Snapshot(b"n" * 16, {"a": b"1", "b": b"x"}, [LastWrite(b"l" * 16, 7, b"\0\xc0")])
ROUNDS = [[b"first", b"of three"], [b"y" * 700], [b"last"]]


def _load(folder: Path) -> tuple[Snapshot, list[list[bytes]]]:
    journal = Journal(folder)
    try:
        loaded = journal.load()
        assert loaded is not None
        return loaded[0], [*loaded[1]]
    finally:
        journal.close()


def _put(path: Path, data: bytes | bytearray) -> None:
    """Let the file hold ``data``, without the file system's flush of a file that is emptied first."""
    with path.open("r+b", buffering=0) as file:
        file.write(data)
        file.truncate()


@pytest.fixture(autouse=True)
def _no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, bytes, list[int]]:
    """A directory, what its file holds, and where each round ends."""
    folder = tmp_path / "log"
    journal = Journal(folder)
    assert journal.load() is None
    journal.rewrite(SNAPSHOT)
    ends = [(folder / "log").stat().st_size]
    for messages in ROUNDS:
        journal.append(messages)
        ends.append((folder / "log").stat().st_size)
    journal.close()
    return folder, (folder / "log").read_bytes(), ends


def test_what_was_written_is_read(written: tuple[Path, bytes, list[int]]) -> None:
    folder, data, _ = written
    for _ in range(2):
        assert _load(folder) == (SNAPSHOT, ROUNDS)
    assert (folder / "log").read_bytes() == data


def test_a_torn_end_is_cut_off_wherever_it_is(written: tuple[Path, bytes, list[int]]) -> None:
    folder, data, ends = written
    for length in range(ends[0], len(data)):
        whole = sum(end <= length for end in ends) - 1
        _put(folder / "log", data[:length])
        assert _load(folder) == (SNAPSHOT, ROUNDS[:whole]), length
        assert (folder / "log").stat().st_size == ends[whole]


def test_an_end_that_was_never_written_is_cut_off(written: tuple[Path, bytes, list[int]]) -> None:
    """The file was made longer, but the machine failed before these sectors were written."""
    folder, data, ends = written
    _put(folder / "log", data + bytes(1500))
    assert _load(folder) == (SNAPSHOT, ROUNDS)
    sector = ends[1] - ends[1] % 512 + 512
    _put(folder / "log", data[:sector] + bytes(ends[2] - sector))
    assert _load(folder) == (SNAPSHOT, ROUNDS[:1])


def test_a_byte_that_changed_is_refused_wherever_it_is(written: tuple[Path, bytes, list[int]]) -> None:
    folder, data, _ = written
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x55
        _put(folder / "log", changed)
        with pytest.raises(StoreError, match="another version" if at < len(_MAGIC) else "is damaged at byte"):
            _load(folder)
        assert (folder / "log").read_bytes() == changed


def test_a_snapshot_without_an_end_is_refused(written: tuple[Path, bytes, list[int]]) -> None:
    folder, data, ends = written
    for length in range(len(_MAGIC), ends[0]):
        _put(folder / "log", data[:length])
        with pytest.raises(StoreError, match="its snapshot has no end"):
            _load(folder)


def test_a_log_of_another_version_is_refused(written: tuple[Path, bytes, list[int]]) -> None:
    folder, data, _ = written
    _put(folder / "log", data.replace(b"log 1\n", b"log 2\n", 1))
    with pytest.raises(StoreError, match="another version of shoal"):
        _load(folder)
