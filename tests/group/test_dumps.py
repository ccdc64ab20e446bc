"""Dumps of a group: whole files, on every rank, and never another failure."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal import ProcessGroup
from shoal.testing import no_leaks, processes, run_threads
from tests.support.waiting import until

PATIENCE = 30.0


def _dumps(folder: Path, count: int) -> dict[int, dict[str, Any]]:
    """The dumps in ``folder`` by the rank that wrote them, as soon as there are ``count``."""

    def files() -> list[Path]:
        return list(folder.glob("shoal-*.json"))

    until(lambda: len(files()) >= count, files)
    found = [json.loads(file.read_bytes()) for file in files()]
    assert len(found) == count
    return {content["rank"]: content for content in found}


def standing_still(here: threading.Barrier, event: threading.Event) -> None:
    here.wait(PATIENCE)
    event.wait(PATIENCE)


def test_every_rank_writes_what_it_knew_when_an_operation_timed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_DUMP_DIR", str(tmp_path / "made" / "here"))
    written, here = threading.Event(), threading.Barrier(3)

    def rank(group: ProcessGroup) -> None:
        group.barrier().wait()
        if group.rank == 1:
            standing_still(here, written)
            return
        here.wait(PATIENCE)  # or the later one would be missed, too
        try:
            with pytest.raises(shoal.OperationTimeout):
                group.all_reduce(torch.ones(5), timeout=5.0).wait(PATIENCE)
            found = _dumps(tmp_path / "made" / "here", 3)
        finally:
            if group.rank == 0:
                written.set()
        if group.rank == 2:
            return
        for number, content in found.items():
            assert content["schema"] == "shoal.dump/1"
            assert (content["job"], content["group"], content["ranks"]) == ("threads", "world", [0, 1, 2])
            assert (content["state"], content["pid"]) == ("broken", os.getpid())
            assert content["error"]["type"] == "OperationTimeout"
            assert content["error"]["ranks"] == [1]
            assert "all_reduce (operation 1) did not finish" in content["error"]["message"]
            last = content["entries"][-1]
            assert (last["kind"], last["number"]) == (("barrier", 0) if number == 1 else ("all_reduce", 1))
        stacks = {stack["thread"]: stack["frames"] for stack in found[1]["stacks"]}
        assert any(" in standing_still" in frame for frame in stacks["rank 1"])

    with no_leaks():
        run_threads(rank, 3, timeout=PATIENCE)


def test_a_mismatch_and_a_refused_call_write_one_dump_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_DUMP_DIR", str(tmp_path))

    def rank(group: ProcessGroup) -> None:
        inner = group.subgroup([1, 0])
        for _ in range(2):
            with pytest.raises(shoal.CollectiveMismatch):
                (inner.barrier() if inner.rank else inner.all_reduce(torch.ones(1))).wait(PATIENCE)
        _dumps(tmp_path, 2)
        inner.close()
        assert group.all_reduce(torch.ones(1)).wait(PATIENCE).item() == 2

    run_threads(rank, 2, timeout=PATIENCE)
    found = _dumps(tmp_path, 2)  # the world has not failed
    assert "rank 0: all_reduce(float32[1], op=SUM)" in found[0]["error"]["message"]
    assert found[1]["group"].startswith("world/subgroup:1,0")
    assert not list(tmp_path.glob(".*"))


def test_a_dump_can_be_had_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_DUMP_DIR", raising=False)
    monkeypatch.chdir(tmp_path)

    def rank(group: ProcessGroup) -> None:
        future = group.all_reduce(torch.ones(2))
        future.wait()
        assert group.dump(tmp_path / "mine.json") == tmp_path / "mine.json"
        content = json.loads((tmp_path / "mine.json").read_bytes())
        assert (content["state"], content["error"]) == ("open", None)
        assert content["entries"][0]["state"] == "completed"
        with group.subgroup([0], name="ä/" * 200) as long:
            assert long.dump(tmp_path).parent == tmp_path
        group.close()
        assert group.dump() == Path(f"shoal-threads-0-world-{os.getpid()}.json")
        assert json.loads((tmp_path / group.dump()).read_bytes())["state"] == "closed"
        with pytest.raises(OSError, match="no such place"):
            group.dump(tmp_path / "no such place" / "x.json")

    run_threads(rank, 1)
    assert len(list(tmp_path.glob("shoal-threads-0-world_*.json"))) == 1
    assert not list(tmp_path.glob(".*"))


def test_a_dump_that_cannot_be_written_replaces_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHOAL_DUMP_DIR", str(tmp_path / "file"))
    with pytest.raises(shoal.ConfigurationError, match=r"SHOAL_DUMP_DIR=.*: files cannot be created there: "):
        shoal.init()

    def rank(group: ProcessGroup) -> None:
        group.abort("for this test")
        with pytest.raises(shoal.GroupAborted, match="for this test"):
            group.barrier()

    with no_leaks(), caplog.at_level(logging.WARNING):
        run_threads(rank, 1)
    (record,) = caplog.records
    assert "rank 0 of group 'world' cannot write a dump: SHOAL_DUMP_DIR=" in record.getMessage()


def survive(group: ProcessGroup, folder: str) -> None:
    """Rank 2 is killed; rank 0 waits for it, and rank 1 does something else."""
    os.environ["SHOAL_DUMP_DIR"] = folder
    inner = group.subgroup([0, 1, 2], name="inner")
    inner.barrier().wait()
    group.store.set(f"ready{group.rank}", b"")
    if group.rank == 0:
        with pytest.raises(shoal.PeerLost):
            inner.all_reduce(torch.ones(1)).wait(PATIENCE)
    else:
        group.store.get("never", PATIENCE) if group.rank == 2 else _dumps(Path(folder), 2)
    inner.close()
    until(lambda: "shoal-dumps" not in [thread.name for thread in threading.enumerate()])


def test_the_survivors_of_a_kill_write_dumps(tmp_path: Path) -> None:
    with no_leaks(), processes(survive, 3, str(tmp_path)) as ranks:
        ranks.store.wait(["ready0", "ready1", "ready2"], PATIENCE)
        ranks.kill(2)
        outcomes = ranks.join()
    for rank in (0, 1):
        assert outcomes[rank].ok, outcomes[rank].describe()
    found = _dumps(tmp_path, 2)
    assert [found[rank]["error"]["ranks"] for rank in (0, 1)] == [[2], [2]]
    assert any(" in survive" in frame for stack in found[1]["stacks"] for frame in stack["frames"])
