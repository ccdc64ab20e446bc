"""``shoal doctor FILE...`` says what happened, by the findings of ``shoal dumps``, and what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from shoal import CollectiveMismatch, ProcessGroup
from shoal.launch.cli import invoke
from shoal.testing import run_threads
from tests.tools.test_dumps import content, entry


def test_dumps_lead_to_the_operation_that_differs_and_to_a_file_that_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stacks = [{"thread": "MainThread", "frames": ["train.py:16 in evaluate"]}]
    for rank, entries in enumerate(
        [
            [entry("barrier", 0), entry("all_reduce", 1, "failed"), entry("barrier", 2, "failed")],
            [entry("barrier", 0), entry("broadcast", 1, "failed")],
        ]
    ):
        (tmp_path / f"shoal-{rank}.json").write_text(json.dumps(content(rank, *entries, stacks=stacks)))
    (tmp_path / "shoal-9.json").write_text("{")
    assert invoke(["doctor", "--json", str(tmp_path)]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(each["topic"], each["status"], each["fact"].partition(":")[0]) for each in found] == [
        ("files", "fail", f"{tmp_path / 'shoal-9.json'} is not a dump of a group"),
        ("group 'g' of 3 ranks, job 'j'", "fail", "no file of rank 2"),
        ("group 'g' of 3 ranks, job 'j'", "fail", "operation 1 is not the same everywhere"),
        ("group 'g' of 3 ranks, job 'j'", "fail", "behind"),
    ]
    assert found[2]["advice"] == "make all ranks call the same operations of a group in the same order"
    assert found[3]["advice"].endswith("from where they were: rank 1 in train.py:16 in evaluate")


def test_dumps_without_a_problem_are_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        (tmp_path / f"shoal-{rank}.json").write_text(json.dumps(content(rank, entry("barrier", 0))))
    assert invoke(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "group 'g' of 3 ranks, job 'j'",
        "  ok   all ranks wrote a file and are at the same call",
        "",
        "0 warnings, 0 failures",
    ]


def test_the_dumps_of_a_real_mismatch_lead_to_its_operation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rank(group: ProcessGroup) -> None:
        x = torch.ones(8)
        for _ in range(3):
            group.all_reduce(x).wait()
        with pytest.raises(CollectiveMismatch):
            (group.all_reduce(x) if group.rank != 2 else group.broadcast(x, root=0)).wait()
        group.dump(tmp_path)

    run_threads(rank, 3)
    assert invoke(["doctor", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert (
        "  fail operation 3 is not the same everywhere: all_reduce on ranks 0, 1; broadcast on rank 2\n"
        in out
    )
    assert (
        "       -> docs/errors.md explains CollectiveMismatch; if it names ranks, look at these first\n"
        in out
    )


def write_workers(folder: Path, waits: Mapping[str, str]) -> None:
    """Write a dump of each worker that waits for another one."""
    for name, callee in waits.items():
        dump = {
            "schema": "shoal.calls/1", "job": "j", "worker": name, "state": "open", "time": 1.0,
            "error": None, "pending": [{"call": "f", "callee": callee, "seconds": 2.0}],
            "served": [], "stacks": [],
        }  # fmt: skip
        (folder / f"shoal-{name}.json").write_text(json.dumps(dump))


def test_workers_that_wait_for_each_other_are_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_workers(tmp_path, {"a": "b", "b": "c", "c": "d", "d": "b"})
    assert invoke(["doctor", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[:2] == [
        "4 workers, job 'j'",
        "  fail they wait for one another: 'b' -> 'c' -> 'd' -> 'b'",
    ]


def test_a_long_chain_of_workers_is_no_cycle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_workers(tmp_path, {f"w{number}": f"w{number + 1}" for number in range(1500)})
    assert invoke(["doctor", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "no file of worker 'w1500', which others wait for" in out
    assert "they wait for one another" not in out
