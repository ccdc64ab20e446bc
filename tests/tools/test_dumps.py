"""``shoal dumps`` puts together what the files of several ranks say."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import ProcessGroup
from shoal.launch.cli import invoke
from shoal.testing import run_threads
from shoal.tools.call_dumps import place_of
from shoal.tools.dump_files import Dump, read
from shoal.tools.dumps import findings
from tests.support.quick_launcher import QuickLauncher


def show(capsys: pytest.CaptureFixture[str], *paths: Path) -> list[str]:
    assert invoke(["dumps", *map(str, paths)]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_rank_that_did_not_come_and_its_place_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = threading.Barrier(3)

    def rank(group: ProcessGroup) -> None:
        group.barrier().wait()
        late = group.all_reduce(torch.ones(8)) if group.rank != 1 else None
        if group.rank != 2:
            group.dump(tmp_path)
        written.wait(30)
        (late or group.all_reduce(torch.ones(8))).wait()

    run_threads(rank, 3)
    lines = show(capsys, tmp_path)
    assert lines[0] == "group 'world' of 3 ranks, job 'threads'"
    row = {line.split()[0]: line for line in lines if line.strip()[:1].isdigit()}
    assert set(row) == {"0", "1"}
    assert row["0"].split()[1:9] == ["open", "barrier", "#0", "all_reduce", "#1", "of", "8", "float32"]
    assert "#1" not in row["1"]
    assert "no file of rank 2: dead, stopped, or in a call that holds the interpreter lock" in lines
    assert "behind: rank 1; operation 1 has been called elsewhere" in lines


BOTH_WORLDS = """
import sys
import torch, torch.distributed as dist
import shoal

with shoal.init() as own:
    dist.init_process_group("shoal")
    beside = dist.group.WORLD._get_backend(torch.device("cpu")).__shoal_group__
    dist.all_reduce(torch.ones(4))
    own.dump(sys.argv[1])
    beside.dump(sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()
"""


def test_a_world_of_torch_belongs_to_the_job_of_the_launcher(
    tmp_path: Path, launcher: QuickLauncher, capsys: pytest.CaptureFixture[str]
) -> None:
    script, folder = tmp_path / "both.py", tmp_path / "dumps"
    script.write_text(BOTH_WORLDS)
    folder.mkdir()
    code, _, err = launcher.run(2, str(script), str(folder))
    assert code == 0, err
    own, beside = [line for line in show(capsys, folder) if line.startswith("group")]
    assert own.startswith("group 'world' of 2 ranks, job ")
    assert beside == own.replace("'world'", "'world of shoal/0'")


def entry(kind: str, number: int, state: str = "completed") -> dict[str, Any]:
    return {
        "kind": kind, "number": number, "key": 0, "dtype": "", "count": 0, "root": -1, "peer": -1, "tag": -1,
        "state": state, "submitted": 0, "ended": 0,
    }  # fmt: skip


def content(rank: int, *entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "schema": "shoal.dump/1", "job": "j", "group": "g", "rank": rank, "ranks": [0, 1, 2], "state": "open",
        "time": float(rank), "now": 10**9, "error": None, "entries": list(entries), "stacks": [], **more,
    }  # fmt: skip


def written(folder: Path, *contents: dict[str, Any]) -> dict[int, Dump]:
    found = {}
    for number, one in enumerate(contents):
        path = folder / f"shoal-{number}.json"
        path.write_text(json.dumps(one))
        found[one["rank"]] = read(path)
    return found


def test_the_first_operation_that_differs_and_the_first_failure_are_named(tmp_path: Path) -> None:
    error = {"type": "CollectiveMismatch", "message": "they differ", "ranks": [1]}
    members = written(
        tmp_path,
        content(
            0,
            entry("barrier", 0),
            entry("all_reduce", 1, "failed"),
            error={**error, "message": "later"},
            time=9.0,
        ),
        content(1, entry("barrier", 0), entry("broadcast", 1, "failed"), error=error),
        content(2, entry("barrier", 0), entry("all_reduce", 1, "failed")),
    )
    assert [each.fact for each in findings(members, 3)] == [
        "rank 1 wrote first: CollectiveMismatch: they differ",
        "operation 1 is not the same everywhere: all_reduce on ranks 0, 2; broadcast on rank 1",
    ]


def test_the_place_is_the_programs_and_not_a_librarys(tmp_path: Path) -> None:
    frames = [
        "/home/me/shoal/train.py:9 in step",  # a folder of that name does not make it the package
        "/usr/lib/python3.12/threading.py:1 in wait",
        "/venv/lib/python3.12/site-packages/shoal/future/future.py:1 in wait",
        "/checkout/src/shoal/future/future.py:1 in wait",
    ]
    stacks = [
        {"thread": "MainThread", "frames": frames},
        {"thread": "other", "frames": ["/home/me/b.py:1 in f"]},
    ]
    (dump,) = written(tmp_path, content(0, stacks=stacks)).values()
    assert place_of(dump.stacks) == "/home/me/shoal/train.py:9 in step"


def test_of_several_files_of_a_rank_the_latest_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, content(0, state="broken", time=2.0), content(0, state="open", time=1.0))
    rows = [line.split() for line in show(capsys, tmp_path)]
    assert ["0", "broken"] in rows
    assert ["0", "open"] not in rows


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not a dump of a group: "),
        ("[]", "is not a dump of a group: "),
        (json.dumps(content(0, schema="shoal.dump/9")), "this release of shoal cannot read 'shoal.dump/9'"),
        (json.dumps(content(3)), "rank 3 is not one of 3 ranks"),
        (json.dumps(content(0, time=1e308)), "Expected `float` <= "),
        (json.dumps(content(0, {**entry("gather", 0), "count": 10**400})), "Expected `int` <= "),
        (None, "No such file or directory"),
    ],
)
def test_another_file_is_refused_in_a_line(
    text: str | None, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "shoal-x.json"
    if text is not None:
        path.write_text(text)
    assert invoke(["dumps", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"shoal: {path}")
    assert problem in error
    assert error.count("\n") == 1


def test_a_file_that_never_ends_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shoal-a.json").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "shoal-b.json")
    assert invoke(["doctor", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    for name in ("a", "b"):
        assert f"fail {tmp_path}/shoal-{name}.json: not a regular file\n" in out
    with (tmp_path / "shoal-c.json").open("wb") as file:
        file.truncate(2**40)
    assert invoke(["dumps", str(tmp_path / "shoal-c.json")]) == 2
    assert "File too large" in capsys.readouterr().err


def test_escapes_for_the_terminal_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[2J\x07"
    stacks = [{"thread": "MainThread", "frames": [f"{evil}.py:1 in f"]}]
    error = {"type": evil, "message": f"{evil}\nmore"}
    pending = [entry(evil, 0), entry(evil, 1, "failed")]
    calls = {
        "schema": "shoal.calls/1", "job": evil, "worker": evil, "state": evil, "time": 1.0, "error": error,
        "pending": [{"call": evil, "callee": evil, "seconds": 2.0}], "stacks": stacks,
        "served": [{"call": evil, "caller": evil, "seconds": None}],
        "nodes": [{"session": evil, "commands": [evil], "runs": evil}],
    }  # fmt: skip
    written(tmp_path, content(0, *pending, state=evil, error=error, stacks=stacks, group=evil, job=evil))
    (tmp_path / "shoal-calls.json").write_text(json.dumps(calls))
    lines = show(capsys, tmp_path)
    assert "rank 0 wrote first: ?[2J?: ?[2J? more" in lines
    assert not [line for line in lines if not line.isprintable()]
    (tmp_path / f"shoal-{evil}.json").write_text("{")
    assert invoke(["dumps", str(tmp_path)]) == 2
    assert capsys.readouterr().err.strip().isprintable()
