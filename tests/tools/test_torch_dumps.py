"""Torch's own analyser finds the culprit in the files that ``shoal dumps --torch`` makes."""

from __future__ import annotations

import gc
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.flight_recorder import fr_trace

import shoal
from shoal import ProcessGroup
from shoal.launch.cli import invoke
from shoal.testing import processes
from tests.support.waiting import until
from tests.tools.test_dumps import content, entry, written

PATIENCE = 30.0


def convert(capsys: pytest.CaptureFixture[str], source: Path, target: Path) -> str:
    """Convert all dumps in ``source``, and return the last line of the command."""
    assert invoke(["dumps", "--torch", str(target), str(source)]) == 0
    return capsys.readouterr().out.splitlines()[-1]


def torchfrtrace(*arguments: str) -> list[str]:
    """Run torch's analyser as its users do; returns one text for each collective that it complains about."""
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", *arguments],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return re.split(r"(?=Not all ranks joining|Collective sequence number|We cannot decide)", run.stderr)[1:]


def culprits(text: str) -> set[int]:
    """The ranks that differ from the rank whose file the analyser reads first, in the directory's order."""
    return {int(rank) for rank in re.findall(r"Culprit rank (\d+)", text)}


def three_troubles(group: ProcessGroup, folder: str) -> None:
    os.environ["SHOAL_DUMP_DIR"] = folder
    rank, x = group.rank, torch.ones(8)
    differs, absent = (group.subgroup([0, 1, 2], name=name) for name in ("differs", "absent"))
    differs.barrier().wait()
    with pytest.raises(shoal.CollectiveMismatch):
        (differs.all_reduce(x) if rank != 2 else differs.all_gather(x)).wait()
    if rank != 1:
        absent.reduce(x, timeout=0.2)  # not waited for
        with pytest.raises(shoal.OperationTimeout):
            absent.barrier(timeout=0.2).wait()
    until(lambda: len(list(Path(folder).glob("shoal-*.json"))) == 6)
    group.barrier().wait()
    # The world hangs, and nothing has failed yet.
    late = group.all_reduce(x) if rank != 2 else None
    message = group.recv(src=1, tag=4) if rank == 0 else None
    group.dump(folder)
    group.store.add("dumps", 1)
    until(lambda: group.store.add("dumps", 0) == 3)
    if rank == 2:
        late = group.all_reduce(x)
    elif rank == 1:
        message = group.send(x, 0, 4)
    for future in (late, message):
        if future is not None:
            future.wait()


def test_torchfrtrace_names_who_differs_who_is_absent_and_who_is_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with processes(three_troubles, 3, str(tmp_path / "dumps")) as ranks:
        assert [outcome.describe() for outcome in ranks.join() if not outcome.ok] == []
    target = tmp_path / "for torch"
    assert convert(capsys, tmp_path / "dumps", target) == f"wrote 3 files: run torchfrtrace '{target}'"
    found = {}
    for text in torchfrtrace(str(target)):
        group = re.search(r"group info: \d+:(?:world/)?([a-z ]+)", text)
        assert group, text
        found.setdefault(group[1], text)
    assert set(found) == {"differs", "absent", "world", "messages of world"}
    assert "Collective sequence number: 1 has errors" in found["differs"]
    assert culprits(found["differs"]) in ({2}, {0, 1})
    assert "Error type: COLLECTIVE_TYPE_MISMATCH" in found["differs"]
    assert "missing ranks: {1}" in found["absent"]
    assert "sequence number: 0\n" in found["absent"]
    assert "missing ranks: {2}" in found["world"]
    assert "sequence number: 1\n" in found["world"]
    assert re.search(
        r"collective stack trace: \n .*three_troubles at .*test_torch_dumps.py", found["world"], re.S
    )
    assert "missing ranks: {1}" in found["messages of world"]
    assert "collective: nccl:recv 0<-1" in found["messages of world"]


def wait_for_a_killed_rank(group: ProcessGroup, folder: str) -> None:
    os.environ["SHOAL_DUMP_DIR"] = folder
    inner = group.subgroup([0, 1, 2])
    inner.barrier().wait()
    group.store.set(f"ready{group.rank}", b"")
    if group.rank == 1:
        group.store.get("never", PATIENCE)
    with pytest.raises(shoal.PeerLost):
        inner.all_reduce(torch.ones(1)).wait(PATIENCE)


def test_torchfrtrace_names_the_killed_rank_that_wrote_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with processes(wait_for_a_killed_rank, 3, str(tmp_path / "dumps")) as ranks:
        ranks.store.wait(["ready0", "ready1", "ready2"], PATIENCE)
        ranks.kill(1)
        outcomes = ranks.join()
    assert outcomes[0].ok, outcomes[0].describe()
    target = tmp_path / "t"
    line = convert(capsys, tmp_path / "dumps", target)
    assert line == f"wrote 2 files: run torchfrtrace --allow-incomplete-ranks {target}"
    texts = torchfrtrace("--allow-incomplete-ranks", str(target))
    assert any("we missed FR dumps from ranks ({1})" in text for text in texts), texts


def analysed(folder: Path, caplog: pytest.LogCaptureFixture, *contents: dict[str, Any]) -> list[str]:
    """Convert dumps, and return the lines of torch's analyser."""
    written(folder, *contents)
    assert invoke(["dumps", "--torch", str(folder / "t"), str(folder)]) == 0
    caplog.clear()
    try:
        fr_trace.main([str(folder / "t")])
    finally:
        gc.enable()  # which the analyser disables
    return [record.getMessage() for record in caplog.records]


def test_what_is_in_order_is_no_mismatch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a recorder that has dropped operations, nor parts of different sizes, nor unknown outcomes."""

    def rank(number: int) -> dict[str, Any]:
        older = [entry("barrier", old) for old in range(number * 3)]
        in_callback = {**entry("all_reduce", -1), "key": 2**63 + 1}
        parts = [
            {**entry("all_gather", 6), "dtype": "float32", "count": 3 + number},
            {**entry("gather", 7), "dtype": "int64", "count": number, "root": 1},
            {**entry("scatter", 8), "dtype": "int8", "count": (3, 1, 2)[number], "root": 0},
            {**entry("reduce_scatter", 9), "dtype": "int8", "count": 7},
            {**entry("all_to_all", 10), "dtype": "int8", "count": 6},
        ]
        seen = entry("all_reduce", 11, "completed" if number else "released")
        message = {**entry("send", -1), "peer": (number + 1) % 3, "tag": 0, "count": 1}
        return content(number, *older, *([in_callback] if number else []), *parts, seen, message)

    assert analysed(tmp_path, caplog, rank(0), rank(1), rank(2)) == []
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == [
        f"shoal_rank_{rank}" for rank in range(3)
    ]
    assert (tmp_path / "t" / "shoal_rank_0").stat().st_mode & 0o777 == 0o600
    files = [pickle.loads((tmp_path / "t" / f"shoal_rank_{rank}").read_bytes()) for rank in range(3)]
    assert [len(file["entries"]) for file in files] == [6, 6, 6]
    assert files[0]["pg_status"]["0"]["last_completed_collective"] == 11


def test_operations_in_callbacks_and_sizes_are_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    error = {"type": "CollectiveMismatch", "message": "they differ", "ranks": [1]}
    keyed = {**entry("all_reduce", -1, "submitted"), "key": 2**63 + 1, "dtype": "int8", "count": 2}
    stacks = [{"thread": "MainThread", "frames": ["a.py:7 in f", f"b.py:{'9' * 5000} in g"]}]

    def rank(number: int, *more: dict[str, Any]) -> dict[str, Any]:
        gather = {**entry("all_gather", 0, "failed"), "dtype": "int8", "count": 5 + (number == 1)}
        return content(number, *more, gather, error=error, stacks=stacks)

    lines = analysed(tmp_path, caplog, rank(0, keyed), rank(1), rank(2, keyed))
    assert f"Not all ranks joining collective, sequence number: {2**63 + 1}" in lines
    assert "missing ranks: {1}" in lines
    (mismatch,) = [line for line in lines if "Error type: SIZE_OR_SYNTAX_MISMATCH" in line]
    assert culprits(mismatch) in ({1}, {0, 2})
    assert set(re.findall(r"\[\[\d+\]\]", mismatch)) == {"[[5]]", "[[6]]"}
    (gathered,) = pickle.loads((tmp_path / "t" / "shoal_rank_1").read_bytes())["entries"]
    assert gathered["frames"] == [{"name": "f", "filename": "a.py", "line": 7}]


def test_what_cannot_be_converted_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, content(0))

    def error(*arguments: object) -> str:
        assert invoke(["dumps", *map(str, arguments)]) != 0
        text = capsys.readouterr().err
        assert text.count("\n") == 1, text
        return text

    path = tmp_path / "shoal-0.json"
    assert f"--torch {tmp_path}: the directory is not empty" in error("--torch", tmp_path, path)
    assert f"--torch {path}: File exists" in error("--torch", path, path)
    written(tmp_path, content(0), content(1, job="k"))
    assert "--torch: the dumps are of several jobs: 'j', 'k'; give" in error(
        "--torch", tmp_path / "t", tmp_path
    )
    assert not (tmp_path / "t").exists()
