"""``shoal trace merge``: one file of all ranks, on one clock, and every damaged file is named."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from shoal import ProcessGroup
from shoal.launch.cli import invoke
from shoal.testing import run_threads
from shoal.tools.traces import inputs
from shoal.tools.traces.clocks import ClockBounds
from shoal.tracing import recording, spool
from tests.support.chrome_traces import ChromeTrace
from tests.tracing.test_recording import run_with_late_rank

SECOND = 10**9


def merge(
    capsys: pytest.CaptureFixture[str], folder: Path, output: Path, *options: str
) -> tuple[ChromeTrace, list[str]]:
    assert invoke(["trace", "merge", str(folder), "-o", str(output), *options]) == 0
    return ChromeTrace(output), capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert invoke(["trace", "merge", *arguments]) == 2
    return capsys.readouterr().err


def lateness(group: ProcessGroup) -> None:
    """In collective k the rank k is late."""
    for late in range(group.size):
        run_with_late_rank(group, late)
        group.store.wait([f"begun {rank}" for rank in range(group.size) if rank != late])
        group.barrier().wait()
        if group.rank != late:
            group.store.delete(f"begun {group.rank}")
        group.barrier().wait()


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_every_rank_that_waited_has_an_arrow_from_the_last_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "traces"
    with shoal.trace(folder):
        run_threads(lateness, 4, hosts=["a", "a", "b", "b"])
    merged, lines = merge(capsys, folder, tmp_path / "job.json.gz")
    arrows = {number: (last, who) for (last, number), who in merged.arrows.items() if number % 3 == 0}
    assert arrows == {3 * late: (late, {0, 1, 2, 3} - {late}) for late in range(4)}
    assert merged.names("process") == {"rank 0 on a", "rank 1 on a", "rank 2 on b", "rank 3 on b"}
    assert lines[0].startswith(f"{tmp_path / 'job.json.gz'}: 4 ranks, 48 operations, ")
    assert sum("was waited for" in line for line in lines) == 4
    assert [each["offset_us"] for each in merged.other["clocks"].values()] == [0.0]
    assert {each["name"] for each in merged.other["waited_for"]} == merged.names("process")
    # The same files, with a clock of host b that is 5 s ahead.
    ahead = 5 * SECOND
    for rank in (2, 3):

        def move(content: dict[str, Any]) -> None:
            content["otherData"]["rank"]["begun"] += ahead
            content["otherData"]["rank"].update(clock="another one", hostname="b")

        edit(folder / f"shoal-threads-{rank}-{os.getpid()}.trace.json", move)
    moved, lines = merge(capsys, folder, folder / "merged.json")
    clock = moved.other["clocks"]["another one"]
    assert clock["source"] == "collectives"
    assert abs(clock["offset_us"] - ahead / 1e3) <= clock["error_us"]
    assert clock["error_us"] < 1e6
    assert {
        number: who for (_, number), who in moved.arrows.items() if number % 3 == 0
    }.keys() == arrows.keys()
    assert any(line.startswith("the clock of host b is +") and "error at most" in line for line in lines)
    # No common collective is left: the real time remains.
    for path in folder.glob("shoal-*"):
        edit(path, lambda content: content.update(traceEvents=[]))
    _, lines = merge(capsys, folder, folder / "merged.json")
    assert "no rank waited for another one" in lines
    (real,) = (line for line in lines if line.startswith("the clock of host b is +"))
    assert real.endswith("error unknown (from the real time of the hosts)")
    assert abs(float(real.split("+")[1].split()[0]) - 5) < 1  # another clock, read a moment apart


def test_offsets_are_bounded_from_both_sides_and_over_other_hosts() -> None:
    bounds = ClockBounds()
    begin, end = 1000, 1100
    for rank_clock, other_clock, offset in (("a", "b", 50_000), ("b", "c", -7_000)):
        bounds.add(rank_clock, begin, other_clock, end + offset)  # b's clock is ahead by the offset
        bounds.add(other_clock, begin + offset, rank_clock, end)
    found = bounds.offsets("a", {"a": 0, "b": 0, "c": 0, "d": 400})
    assert [found[clock].offset for clock in "abcd"] == [0, 50_000, 43_000, 400]
    assert [found[clock].error for clock in "abcd"] == [0, 100, 200, None]
    bounds.add("a", 1000, "b", 40_000)  # impossible: the clocks drift
    assert bounds.offsets("a", {"a": 0, "b": 0})["b"].error > 100


def test_torch_profiler_of_a_rank_becomes_further_tracks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.profiler import ProfilerActivity, profile, record_function

    def rank(group: ProcessGroup) -> None:
        with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("around"):
            group.all_reduce(torch.ones(2)).wait()
        profiler.export_chrome_trace(str(tmp_path / "host_1.pt.trace.json"))

    with shoal.trace(tmp_path):
        run_threads(rank, 1)
    other = json.loads((tmp_path / "host_1.pt.trace.json").read_text())
    for event in other["traceEvents"]:
        if isinstance(event.get("pid"), int):
            event["pid"] += 1
    (tmp_path / "host_2.pt.trace.json.gz").write_bytes(gzip.compress(json.dumps(other).encode()))
    merged, lines = merge(capsys, tmp_path, tmp_path / "merged.json")
    (around,) = (event for event in merged.events if event.get("name") == "around" and event["ph"] == "X")
    (collective,) = merged.slices("collective")
    slack = 1000.0  # between the two ways to read a clock
    assert around["ts"] - slack < collective["ts"]
    assert collective["ts"] + collective["dur"] < around["ts"] + around["dur"] + slack
    assert around["pid"] != collective["pid"]
    assert {"rank 0", "rank 0, torch: python"} <= {name[:22] for name in merged.names("process")}
    (left_out,) = (line for line in lines if "left out" in line)
    assert left_out.startswith("host_2.pt.trace.json.gz ")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A directory with the traces of two ranks."""
    with shoal.trace(tmp_path):
        run_threads(lambda group: group.barrier().wait(), 2)
    return tmp_path


def _event(content: dict[str, Any]) -> dict[str, Any]:
    event: dict[str, Any] = next(each for each in content["traceEvents"] if each["ph"] == "X")
    return event


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "`$.traceEvents`": lambda content: content.update(traceEvents="none"),
    "`$.otherData.rank.pid`": lambda content: content["otherData"]["rank"].update(pid=-1),
    "cannot read 'shoal.trace/9'": lambda content: content["otherData"]["rank"].update(
        schema="shoal.trace/9"
    ),
    "tid 77, which is not that of a group": lambda content: _event(content).update(tid=77),
    "has no time": lambda content: _event(content).pop("dur"),
    ".ts`": lambda content: _event(content).update(ts=1e300),
    ".dur`": lambda content: _event(content).update(dur=-1.0),
    "number='one'": lambda content: _event(content)["args"].update(number="one"),
    ".args`": lambda content: _event(content).update(args=[[]]),
    "`$.otherData.rank.size`": lambda content: content["otherData"]["rank"].update(size=2**20 + 1),
    ".lanes`": lambda content: content["otherData"]["groups"][0].update(lanes=2**40),
}


@pytest.mark.parametrize("fault", DAMAGES)
def test_a_damaged_trace_is_named(written: Path, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    path = written / f"shoal-threads-1-{os.getpid()}.trace.json"
    edit(path, DAMAGES[fault])
    error = refused(capsys, str(written))
    assert str(path) in error
    assert fault in error
    assert error.endswith("remove it to merge the other files\n")
    path.unlink()
    _, lines = merge(capsys, written, written / "merged.json")
    assert "no trace of rank 1" in lines


def test_files_that_are_no_traces_are_named(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (written / f"shoal-threads-1-{os.getpid()}.trace.json").read_bytes()
    (written / "notes.json").write_text("no trace")
    os.mkfifo(written / "shoal-pipe.trace.json")
    for name, data in (
        ("shoal-a.trace.json", whole[: len(whole) // 2]),
        ("shoal-a.trace.json", b""),
        ("shoal-a.trace.json", b"[" * 100_000),
        ("shoal-a.trace.json", b'"\xff"'),
        ("shoal-a.trace.spool", b""),
        ("shoal-a.trace.spool", b"\xff" * 100),
        ("shoal-a.trace.spool", b"\x01\0\0\0\xc0"),
        ("shoal-a.trace.spool", b"\x10\0\0\0short"),
        ("a.pt.trace.json", b'{"traceEvents": [{"ph": 7}]}'),
        ("a.pt.trace.json", b'{"traceEvents": [{"ph": "X", "ts": "soon"}]}'),
        ("a.pt.trace.json.gz", gzip.compress(b"{}")[:-9]),
        ("a.pt.trace.json.gz", b"not compressed"),
    ):
        (written / name).write_bytes(data)
        error = refused(capsys, str(written))
        assert error.startswith(f"shoal: {written / name} is not a trace of "), error
        (written / name).unlink()
    assert len(merge(capsys, written, written / "merged.json")[0].slices("collective")) == 2


def test_a_file_with_too_many_values_is_refused(
    written: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.tools.traces.inputs._MAX_COMMAS", 2)
    assert "it has more than 2 values" in refused(capsys, str(written))


def test_escapes_for_the_terminal_are_not_printed(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (written / "shoal-\x1b[2J-9-1.trace.json").write_text("{}")
    printed = refused(capsys, str(written))
    assert "shoal-?[2J-9-1.trace.json is not a trace of shoal" in printed
    assert "\x1b" not in printed


def test_traces_of_other_runs_are_refused(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"shoal-threads-1-{os.getpid()}.trace.json"
    content = json.loads((written / name).read_text())
    content["otherData"]["rank"]["pid"] += 1
    (written / "shoal-threads-1-1.trace.json").write_text(json.dumps(content))
    error = refused(capsys, str(written))
    assert "are both of rank 1 of job 'threads', in different processes: give each run of the job" in error
    content["otherData"]["rank"]["job"] = "other"
    (written / "shoal-threads-1-1.trace.json").write_text(json.dumps(content))
    error = refused(capsys, str(written))
    assert "several jobs: threads, other; choose one with --job" in error.replace(
        "other, threads", "threads, other"
    )
    merged, _ = merge(capsys, written, written / "merged.json", "--job", "other")
    assert merged.names("process") == {"rank 1"}
    assert "no trace of job 'third'" in refused(capsys, str(written), "--job", "third")
    # A restart of the job has the same ranks.
    content["otherData"]["rank"].update(job="threads", epoch=1)
    (written / "shoal-threads-1-1.trace.json").write_text(json.dumps(content))
    merged, _ = merge(capsys, written, written / "merged.json")
    assert merged.names("process") == {
        f"rank {each}" for each in ("0 of restart 0", "1 of restart 0", "1 of restart 1")
    }
    assert [each["pid"] for each in merged.other["ranks"] if each["process"]["epoch"] == 0] == [0, 1]
    assert len({each["pid"] for each in merged.other["ranks"]}) == 3
    # Later, ranks of a session met again under a name.
    content["otherData"]["rank"].update(epoch=0, meeting="grown")
    (written / "shoal-threads-1-1.trace.json").write_text(json.dumps(content))
    merged, _ = merge(capsys, written, written / "merged.json")
    assert merged.names("process") == {"rank 0", "rank 1", "rank 1 of meeting 'grown'"}


def test_errors_of_the_command(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert "no file shoal-*.trace.json found; run the job with SHOAL_TRACE=" in refused(
        capsys, str(tmp_path / "empty")
    )
    assert "No such file" in refused(capsys, str(tmp_path / "missing"))
    os.mkfifo(tmp_path / "pipe")  # as /dev/null, which must not be replaced
    error = refused(capsys, str(written), "-o", str(tmp_path / "pipe"))
    assert error == f"shoal: {tmp_path}/pipe cannot be written: it is not a regular file\n"
    error = refused(capsys, str(written), "-o", str(tmp_path / "missing" / "m.json"))
    assert error == f"shoal: {tmp_path}/missing/m.json cannot be written: No such file or directory\n"


@pytest.mark.parametrize("reads", range(4))
def test_a_rank_may_write_its_trace_during_the_merge(
    written: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    (written / f"shoal-threads-0-{os.getpid()}.trace.json").unlink()
    trace = written / f"shoal-threads-1-{os.getpid()}.trace.json"
    whole = trace.read_bytes()
    trace.unlink()
    made = spool.Spool(written, spool.TracedRank(**json.loads(whole)["otherData"]["rank"]))
    made.close()
    left = iter(range(reads))

    def end_rank(call: Callable[[Path], Any]) -> Callable[[Path], Any]:
        def called(path: Path) -> Any:
            if path == made.path and next(left, None) is None:
                trace.write_bytes(whole)
                path.unlink(missing_ok=True)
            return call(path)

        return called

    monkeypatch.setattr(Path, "is_file", end_rank(Path.is_file))
    monkeypatch.setattr(inputs, "read_spool", end_rank(spool.read_spool))
    merged, lines = merge(capsys, written, written / "merged.json")
    assert merged.names("process") == {"rank 1"}
    assert "no trace of rank 0" in lines
    assert made.path.exists() == (reads == 3)  # is_file, and two passes


def traced_rank() -> spool.TracedRank:
    member: Any = SimpleNamespace(
        rank=0, size=1, ranks=(), job="j", job_name="j", epoch=0, meeting="", world_name="", host="h"
    )
    return recording.describe(member, 1)


def test_only_lanes_with_operations_have_a_track(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank = traced_rank()
    made = spool.Spool(tmp_path, rank)
    for ident in range(9):
        made.add_group(spool.TracedGroup(ident, f"group {ident}", (0,), 1000))
    made.add(spool._RECORD.pack(7, 5, *[rank.begun] * 5, *[0] * 6), 0)
    made.close()
    merged, _ = merge(capsys, tmp_path, tmp_path / "merged.json")
    assert merged.names("thread") == {*(f"group {ident}, lane 0" for ident in range(9)), "group 7, lane 5"}


def test_a_spool_is_read_until_its_last_whole_frame(written: Path) -> None:
    spools = written / "spools"
    spools.mkdir()
    rank = traced_rank()
    made = spool.Spool(spools, rank)
    made.add_group(spool.TracedGroup(2**64 - 1, "world", (0,), 1))
    made.add(bytes(80 * 3), 0)
    made.close()
    data = made.path.read_bytes()
    for size in range(len(data)):
        made.path.write_bytes(data[:size])
        try:
            contents = spool.read_spool(made.path)
        except ValueError:
            continue
        assert contents.rank == rank
        assert len(list(contents.records())) in (0, 3)
    made.path.write_bytes(data)
    assert len(list(spool.read_spool(made.path).records())) == 3
