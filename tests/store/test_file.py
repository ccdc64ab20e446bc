"""The store in a file: processes that share it, and processes that are killed."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import shoal
from shoal.errors import StoreError, StoreTimeout
from shoal.store import FileStore, Store
from tests.support.bytecodes import enable_opcode_events

from .conformance import StoreConformance

ENVIRON = {**os.environ, "PYTHONPATH": str(Path(shoal.__file__).parent.parent)}

COUNT = """
import sys
from shoal.store import FileStore
with FileStore(sys.argv[1], timeout=60) as store:
    for _ in range(int(sys.argv[2])):
        store.add("counter", 1)
        store.append("log", sys.argv[3])
"""

WRITE_FOR_EVER = """
import sys
from shoal.store import FileStore
with FileStore(sys.argv[1], timeout=60) as store:
    number = int(sys.argv[2])
    while True:
        number += 1
        store.set(f"slot-{number % 2}", b"%d " % number + b"x" * 500_000)
        print(number, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


class TestFileStore(StoreConformance):
    @pytest.fixture
    def store(self, path: Path) -> Iterator[Store]:
        with FileStore(path, timeout=30) as store:
            yield store


def test_what_was_written_is_there_for_the_next_process(path: Path) -> None:
    with FileStore(path) as store:
        store.multi_set(["a", "b"], [b"1", b"2"])
        store.add("counter", 3)
        store.delete("a")
    with FileStore(path) as store:
        assert store.list_keys() == ["b", "counter"]
        assert store.add("counter", 1) == 4


def test_looking_does_not_make_the_file_grow(path: Path) -> None:
    with FileStore(path) as store:
        store.set("key", b"value")
        size = path.stat().st_size
        store.get("key")
        store.list_keys()
        store.compare_set("key", b"wrong", b"new")
        store.delete("absent")
        assert path.stat().st_size == size


def test_processes_that_hammer_one_file_lose_nothing(path: Path) -> None:
    processes, rounds = 4, 100
    children = [
        subprocess.Popen([sys.executable, "-c", COUNT, str(path), str(rounds), str(i)], env=ENVIRON)
        for i in range(processes)
    ]
    assert [child.wait(60) for child in children] == [0] * processes
    with FileStore(path) as store:
        assert store.get("counter", 0) == b"%d" % (processes * rounds)
        log = store.get("log", 0)
    assert [log.count(b"%d" % i) for i in range(processes)] == [rounds] * processes


def test_a_writer_that_is_killed_at_any_moment_loses_nothing_that_it_was_told_is_done(path: Path) -> None:
    moments = random.Random(0)
    number = 0
    for _ in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", WRITE_FOR_EVER, str(path), str(number)],
            env=ENVIRON,
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            for _ in range(moments.randint(1, 8)):
                number = int(child.stdout.readline())
            for _ in range(moments.randint(0, 20_000)):
                pass  # into the next write, or not
            child.kill()
            number = max([number, *(int(line) for line in child.stdout)])
        with FileStore(path, timeout=10) as store:
            slots = store.multi_get(["slot-0", "slot-1"], 0) if number > 1 else [store.get("slot-1", 0)]
            assert {len(slot.partition(b" ")[2]) for slot in slots} == {500_000}
            # One more may have been written than was told.
            assert max(int(slot.split(b" ")[0]) for slot in slots) - number in (0, 1)
            store.set("survivor", str(number))
            assert store.get("survivor") == b"%d" % number


def _with_torn_record(path: Path, length: int) -> None:
    """A store with one key, and after it the beginning of another record."""
    path.unlink(missing_ok=True)
    with FileStore(path) as store:
        store.set("first", b"1")
        whole = path.stat().st_size
        store.set("second", b"2" * 20)
    os.truncate(path, whole + length)


@pytest.mark.parametrize("length", range(1, 40, 3))
def test_a_torn_record_is_passed_over_and_cut_off_by_the_next_writer(path: Path, length: int) -> None:
    _with_torn_record(path, length)
    with FileStore(path) as reader, FileStore(path) as writer:
        torn = path.stat().st_size
        assert reader.list_keys() == ["first"]
        assert path.stat().st_size == torn
        writer.set("third", b"3")
        assert reader.multi_get(["first", "third"], 0) == [b"1", b"3"]
        assert not reader.check(["second"])
    with FileStore(path) as store:
        assert store.list_keys() == ["first", "third"]


def test_a_file_whose_first_bytes_are_torn_is_begun_anew(path: Path) -> None:
    path.touch(0o600)
    path.write_bytes(b"sho")
    with FileStore(path) as store:
        assert store.num_keys() == 0
        store.set("key", b"value")
        assert store.get("key") == b"value"


def test_damage_in_the_middle_is_reported_and_not_cut_off(path: Path) -> None:
    with FileStore(path) as store:
        store.set("first", b"1" * 100)
        store.set("second", b"2")
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)
    with FileStore(path) as store, pytest.raises(StoreError, match=r"damaged at byte 8"):
        store.set("third", b"3")
    assert path.read_bytes() == data


def test_a_record_of_another_version_is_reported(path: Path) -> None:
    from zlib import crc32

    with FileStore(path) as store:
        store.set("key", b"value")
    with path.open("ab") as file:
        file.write(struct.pack("<II", 3, crc32(b"abc")) + b"abc")
    with FileStore(path) as store:
        for _ in range(2):  # nobody goes on without what it says
            with pytest.raises(StoreError, match="another version"):
                store.get("key")


def test_another_file_is_left_alone(path: Path) -> None:
    path.touch(0o600)
    path.write_text("a file of somebody else")
    with FileStore(path) as store, pytest.raises(StoreError, match="not a file store"):
        store.set("key", b"value")
    assert path.read_text() == "a file of somebody else"


def test_a_path_that_cannot_be_opened_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"absent/store: No such file"):
        FileStore(tmp_path / "absent" / "store")


def test_a_process_that_keeps_the_lock_is_a_timeout(path: Path) -> None:
    import fcntl

    with FileStore(path, timeout=0.02) as store, path.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(StoreTimeout, match="locked by another process"):
            store.set("key", b"value")
        assert not store.check(["key"])


def test_a_full_disk_leaves_the_store_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(path) as store:
        store.set("key", b"old")
        write = os.pwrite

        def fill(fd: int, data: bytes | memoryview, offset: int) -> int:
            monkeypatch.setattr(os, "pwrite", refuse)
            return write(fd, data[: len(data) // 2], offset)

        def refuse(fd: int, data: bytes | memoryview, offset: int) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", fill)
        with pytest.raises(StoreError, match="No space left"):
            store.set("key", b"new")
        monkeypatch.undo()
        assert store.get("key") == b"old"
        store.append("key", b"er")
    with FileStore(path) as store:
        assert store.get("key") == b"older"


def interrupt_at_every_instruction(exists: bool, folder_of_store: Path) -> int:
    """Open a file store with a Ctrl-C at each instruction in turn; how many there were."""
    folder = str(Path(shoal.store.__file__).parent)
    enable_opcode_events()
    before, points, opened = len(os.listdir("/proc/self/fd")), 0, False
    while not opened:
        path = folder_of_store / ("store" if exists else f"store{points}")
        if exists:
            FileStore(path).close()
        points += 1
        left = points

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.startswith(folder) or frame.f_code.co_name == "close":
                return None
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if left == 0:
                left = -1
                raise KeyboardInterrupt
            return trace

        tracing = sys.gettrace()
        try:
            sys.settrace(trace)
            store = FileStore(path)
            opened = left > 0
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracing)
        if opened:
            store.close()
        assert len(os.listdir("/proc/self/fd")) == before, f"interrupted at instruction {points}"
    return points


@pytest.mark.parametrize("exists", [False, True])
def test_a_ctrl_c_in_the_opening_leaves_no_descriptor(exists: bool, tmp_path: Path) -> None:
    """Before any instruction of the store but those that close: Python ignores what a finalizer raises."""
    # In a thread of its own: an error that was handled there stays the context of later ones (CPython 3.11).
    with ThreadPoolExecutor(1) as pool:
        points = pool.submit(interrupt_at_every_instruction, exists, tmp_path).result()
    assert points > 100
