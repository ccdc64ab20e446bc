"""``shoal.trace`` and ``SHOAL_TRACE``: a whole file of every rank, however it ends."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shoal
from shoal import ProcessGroup
from shoal.backend.native.gathering import all_gather_bytes
from shoal.launch.cli import invoke
from shoal.testing import processes, run_threads
from shoal.tracing import recording, spool
from tests.support.chrome_traces import ChromeTrace
from tests.support.waiting import until


def traces(folder: Path) -> dict[int, ChromeTrace]:
    """The traces in a folder by rank, and nothing else is there."""
    found = {}
    for path in folder.iterdir():
        assert path.name.startswith("shoal-")
        assert path.name.endswith(".trace.json")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        trace = ChromeTrace(path)
        found[trace.other["rank"]["rank"]] = trace
    return found


def run_with_late_rank(group: ProcessGroup, late: int) -> None:
    """One all-reduce, which ``late`` calls when all others have begun it."""
    others = [f"begun {rank}" for rank in range(group.size) if rank != late]
    x = torch.ones(2)
    if group.rank == late:
        group.store.wait(others)
        group.all_reduce(x).wait()
    else:
        future = group.all_reduce(x)
        group.store.set(f"begun {group.rank}", b"")
        future.wait()


def various(group: ProcessGroup) -> None:
    run_with_late_rank(group, 2)
    if group.rank == 0:
        group.send(torch.ones(3), 1).wait()
    if group.rank == 1:
        group.recv(torch.ones(3)).wait()
    group.all_reduce(torch.ones(2)).then(lambda _: group.barrier()).wait().wait()
    if group.rank != 1:
        with group.subgroup([0, 2], name="two", concurrency=2) as two:
            for future in [two.all_reduce(torch.ones(4)) for _ in range(6)]:
                future.wait()


def test_a_block_traces_groups_that_exist_and_those_made_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    begin, traced, ended = (threading.Barrier(4) for _ in range(3))

    def rank(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(2)).wait()  # before the trace
        begin.wait(60)
        traced.wait(60)
        various(group)
        ended.wait(60)
        traced.wait(60)
        group.all_reduce(torch.ones(2)).wait()  # after it

    ranks = threading.Thread(target=run_threads, args=(rank, 3))
    ranks.start()
    try:
        begin.wait(60)
        with shoal.trace(folder):
            traced.wait(60)
            ended.wait(60)
        found = traces(folder)
        traced.wait(60)
    finally:
        ranks.join()
    assert sorted(found) == [0, 1, 2]
    assert traces(folder).keys() == found.keys()
    for number, trace in found.items():
        world = [each for each in trace.slices("collective") if each["args"]["group"] == "world"]
        assert [(each["name"], each["args"]["number"]) for each in world] == [
            ("all_reduce", 1), ("all_reduce", 2)
        ]  # fmt: skip
        assert world[0]["args"]["bytes"] == 8
        assert ("last" in world[0]["args"]) == (number != 2)
        assert [each["name"] for each in trace.intervals("keyed")] == ["barrier"]
        assert trace.names("process") == {f"rank {number}"}
    for number in (0, 1):
        wait = next(each for each in found[number].slices("wait") if each["args"]["number"] == 1)
        # If rank 2 arrived before it was scheduled again, it knows only the other one of the two.
        assert wait["args"]["last"] in {0, 1, 2} - {number}
        assert wait["name"] == f"wait for rank {wait['args']['last']}"
        assert any(each["args"]["number"] == 1 for each in found[number].slices("move"))
    assert [each["name"] for each in found[0].intervals("message")] == ["send to rank 1"]
    assert [each["name"] for each in found[1].intervals("message")] == ["recv from rank 0"]
    two = "world/two:0,2:1:concurrency=2"
    assert found[0].names("thread") == {"world", f"{two}, lane 0", f"{two}, lane 1"}
    lanes = {(each["tid"], each["args"]["number"] % 2) for each in found[0].slices("collective")[2:]}
    assert len(lanes) == 2
    assert found[0].other["groups"][1]["ranks"] == [0, 2]


def test_worlds_of_one_process_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spool, "MAX_OPERATIONS", 5)

    def rank(group: ProcessGroup, count: int) -> None:
        for _ in range(count):
            group.barrier().wait()

    with caplog.at_level(logging.WARNING), shoal.trace(tmp_path):
        run_threads(rank, 2, 3)
        assert not caplog.records
        run_threads(rank, 2, 9)
    counts = {path.name: len(ChromeTrace(path).slices("collective")) for path in tmp_path.iterdir()}
    assert counts == {
        f"shoal-threads-{number}-{os.getpid()}{end}.trace.json": count
        for number in (0, 1)
        for end, count in (("", 3), ("-2", 5))
    }
    assert len(caplog.records) == 2
    assert "lacks 4 operations and all later ones: trace fewer steps" in caplog.text


def test_groups_that_a_backend_makes_for_itself_are_not_traced(tmp_path: Path) -> None:
    def rank(group: ProcessGroup) -> None:
        world = group._world
        gathered = all_gather_bytes(world.links.backend, world.membership, bytes([group.rank]), 60.0)
        assert gathered == [b"\0", b"\1"]
        group.barrier().wait()

    with shoal.trace(tmp_path):
        run_threads(rank, 2)
    for trace in traces(tmp_path).values():
        assert trace.names("thread") == {"world"}
        assert [each["name"] for each in trace.slices("collective")] == ["barrier"]
        assert [each["name"] for each in trace.other["groups"]] == ["world"]


@pytest.mark.concurrency
def test_the_last_context_may_be_closed_inside_a_critical_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the garbage collector, while the thread that drains the contexts waits for the lock."""
    monkeypatch.setenv("SHOAL_TRACE", str(tmp_path))
    closed = threading.Event()

    def close_in_critical_section() -> None:
        group = shoal.init()
        thread = next(each for each in threading.enumerate() if each.name == "shoal-trace")
        with recording._lock:
            until(lambda: sys._current_frames()[thread.ident or 0].f_code.co_name == "_run")
            group.close()
        closed.set()

    threading.Thread(target=close_in_critical_section, daemon=True).start()
    assert closed.wait(60)
    assert sorted(traces(tmp_path)) == [0]


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let each write to a spool fail after a part of it."""
    write = os.write

    def fail(fd: int, data: bytes) -> int:
        if not os.readlink(f"/proc/self/fd/{fd}").endswith(".trace.spool"):
            return write(fd, data)
        if len(data) <= 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:-4])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", fail)
        yield


def test_a_trace_on_a_full_disk_ends_after_its_last_whole_frame(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks(suffix: str) -> None:
        """The merge reports it."""
        assert invoke(["trace", "merge", str(tmp_path)]) == 0
        (tmp_path / "merged.json.gz").unlink()
        assert f"{suffix} lacks all operations after a write failed" in capsys.readouterr().out

    def rank(group: ProcessGroup) -> None:
        (path,) = tmp_path.iterdir()
        group.barrier().wait()
        until(lambda: any(True for _ in spool.read_spool(path).records()))
        with full_disk():
            group.all_reduce(torch.ones(2)).wait()
            until(lambda: "the trace ends early: " in caplog.text)
        with group.subgroup([0], name="later") as later:  # there is room again
            later.barrier().wait()
        lacks(".trace.spool")

    with shoal.trace(tmp_path):
        run_threads(rank, 1)
    (trace,) = traces(tmp_path).values()
    assert [each["name"] for each in trace.slices("collective")] == ["barrier"]
    assert caplog.text.count("No space left on device") == 1
    lacks(".trace.json")


def test_failed_operations_are_marked(tmp_path: Path) -> None:
    def rank(group: ProcessGroup) -> None:
        group.barrier().wait()
        if group.rank == 1:
            group.store.wait(["queued"])
            group.abort("enough")
            return
        futures = [group.all_reduce(torch.ones(2)) for _ in range(3)]
        group.store.set("queued", b"")
        for future in futures:
            with pytest.raises(shoal.GroupAborted):
                future.wait()

    with shoal.trace(tmp_path):
        run_threads(rank, 2)
    found = traces(tmp_path)
    first, failed = found[0].slices("collective")
    assert "failed" not in first["args"]
    assert failed["args"]["failed"] is True
    assert failed["args"]["number"] == 1
    (wait,) = (each for each in found[0].slices("wait") if each["args"]["number"] == 1)
    assert wait["name"] == "wait for rank 1"
    assert all(each["args"]["number"] == 0 for each in found[0].slices("move"))
    never_begun = [each["args"]["number"] for each in found[0].events if each["ph"] == "i"]
    assert never_begun == [2, 3]
    assert len(found[1].slices("collective")) == 1


def killed(group: ProcessGroup) -> None:
    run_with_late_rank(group, 1)
    if os.fork() == 0:
        os._exit(0)  # a child does not touch the trace of its parent
    os.wait()
    future = group.barrier() if group.rank != 2 else None
    group.store.set(f"ready {group.rank}", b"")
    if future is None:
        threading.Event().wait()
        return
    with pytest.raises(shoal.PeerLost):
        future.wait()
    assert [each.name for each in threading.enumerate()].count("shoal-trace") == 1
    group.world.close(5.0)
    assert "shoal-trace" not in [each.name for each in threading.enumerate()]


def test_the_trace_of_a_killed_rank_is_kept_and_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "traces"
    with processes(killed, 3, env={"SHOAL_TRACE": str(folder)}) as ranks:
        ranks.store.wait([f"ready {rank}" for rank in range(3)])
        (left,) = folder.glob("shoal-default-2-*.trace.spool")
        until(lambda: any(True for _ in spool.read_spool(left).records()))
        ranks.kill(2)
        outcomes = ranks.join()
    assert [(outcome.error, outcome.exitcode) for outcome in outcomes] == [(None, None)] * 2 + [(None, -9)]
    # A spool may end in the middle of a frame.
    with open(left, "ab") as file:
        file.write(b"\x40\0\0\0half of a frame")
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"shoal-default-{rank}-{ranks.pids[rank]}.trace.json" for rank in (0, 1)] + [left.name]
    for path in folder.glob("*.json"):
        ChromeTrace(path)
    assert invoke(["trace", "merge", str(folder), "-o", str(tmp_path / "merged.json")]) == 0
    merged = ChromeTrace(tmp_path / "merged.json")
    assert merged.arrows == {(1, 0): {0, 2}}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'merged.json'}: 3 ranks, 5 operations, 1 arrow to waiting ranks")
    assert any(line.startswith("rank 2 was waited for 2 times, for ") for line in lines)


def refused(why: str, folder: Path) -> None:
    with pytest.raises(shoal.UsageError, match=why), shoal.trace(str(folder)):
        raise AssertionError("the block must not begin")


def test_a_directory_that_cannot_be_written_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    advice = "files cannot be created there: .*; name a directory that this user may write to"
    refused(f"trace\\('.*file/in'\\): {advice}", tmp_path / "file" / "in")
    refused(advice, tmp_path / "file")
    refused(advice, tmp_path / "\0")
    with shoal.trace(tmp_path):
        refused("another trace is running: leave its with block first", tmp_path / "new")
    monkeypatch.setenv("SHOAL_TRACE", str(tmp_path / "file"))
    with pytest.raises(shoal.ConfigurationError, match=f"SHOAL_TRACE='.*file': {advice}"):
        shoal.init()
    monkeypatch.setenv("SHOAL_TRACE", str(tmp_path / "all"))
    refused("SHOAL_TRACE traces the whole program: unset it to trace a part", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with shoal.init() as group:
        group.barrier().wait()
    (trace,) = traces(tmp_path / "all").values()
    assert [each["name"] for each in trace.slices("collective")] == ["barrier"]
    assert "shoal-trace" not in [each.name for each in threading.enumerate()]


def test_a_trace_that_cannot_be_written_at_the_end_is_an_error(tmp_path: Path) -> None:
    def rank(group: ProcessGroup) -> None:
        def trace(folder: Path, fails: bool) -> None:
            with shoal.trace(folder):
                group.barrier().wait()
                if fails:
                    raise ValueError("of the program")
                shutil.rmtree(folder)

        with pytest.raises(OSError, match=r"the trace .* cannot be written: No such file or directory$"):
            trace(tmp_path / "removed", False)
        with pytest.raises(ValueError, match="of the program"):
            trace(tmp_path / "next", True)

    run_threads(rank, 1)
    (trace,) = traces(tmp_path / "next").values()
    assert [each["args"]["number"] for each in trace.slices("collective")] == [1]
    assert json.dumps(trace.other)
