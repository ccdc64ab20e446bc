"""The file of a trace: valid, in one order, on one clock, with the lines of the program."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from shoal.controller import Master
from shoal.controller.api import trace
from shoal.controller.commands import node_trace
from shoal.controller.node import history as at_node
from shoal.controller.node.history import BatchReply


def _line(text: str) -> str:
    """Where this file says so, as traces have it."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, each in enumerate(lines, 1) if each.strip() == text]
    return f"{__file__}:{number}, in "


def _traced(master: Master, path: Path) -> dict[str, Any]:
    place = master.place([0, 1])
    with master.trace(path):
        x = torch.ones(64, 64).to("node:0")
        y = x @ x + 1
        moved = y.to("node:1")
        with pytest.raises(shoal.RemoteOpError):
            y[torch.tensor([99], device="node:0")].tolist()
        both = torch.ones(3, device=place.device)
        place.all_reduce_(both)
        moved.sum().item()
        master.synchronize()
    collected: dict[str, Any] = json.loads(path.read_text())
    return collected


def test_a_trace_has_all_that_happened_with_its_lines(master: Master, tmp_path: Path) -> None:
    collected = _traced(master, tmp_path / "t.json")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["t.json"]
    events = collected["traceEvents"]
    names = {each["args"]["name"] for each in events if each["ph"] == "M"}
    assert {"master", "node 0", "node 1", "node 2", threading.current_thread().name} <= names
    found = {(each["pid"], each["name"]): each for each in events if each["ph"] == "X"}
    lines = {
        (1, "aten.mm"): ("operation", "y = x @ x + 1"),
        (1, "aten.add.Tensor"): ("operation", "y = x @ x + 1"),
        (1, "shoal_node.send"): ("copy", 'moved = y.to("node:1")'),
        (2, "shoal_node.receive"): ("copy", 'moved = y.to("node:1")'),
        (1, "put"): ("command", None),
        (2, "shoal_node.all_reduce_"): ("collective", "place.all_reduce_(both)"),
        (0, "wait for node 1"): ("wait", None),
    }
    for which, (category, text) in lines.items():
        assert found[which]["cat"] == category, which
        if text is not None:
            assert found[which]["args"]["line"].startswith(_line(text)), which
    waits = [each["args"]["line"] for each in events if each["name"] == "wait for node 1"]
    assert any(each.startswith(_line("moved.sum().item()")) for each in waits)
    assert collected["otherData"]["lost"] == []
    assert collected["otherData"]["dropped"] == {}


def test_events_are_in_one_order_on_one_clock(master: Master, tmp_path: Path) -> None:
    began = time.monotonic_ns()
    collected = _traced(master, tmp_path / "t.json")
    took = (time.monotonic_ns() - began) / 1e3
    timed = [each for each in collected["traceEvents"] if each["ph"] != "M"]
    assert timed == sorted(timed, key=lambda each: each["ts"])
    for each in timed:
        assert each["ts"] + each.get("dur", 0) < took
    tracks: dict[tuple[int, int], list[Any]] = {}
    for each in timed:
        if each["ph"] == "X":
            tracks.setdefault((each["pid"], each["tid"]), []).append(each)
    for track in tracks.values():  # one thing after another
        for one, other in itertools.pairwise(track):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3
    batches: dict[str, dict[str, float]] = {}
    for each in timed:
        if each["cat"] == "batch":
            batches.setdefault(each["id"], {})[each["ph"]] = each["ts"]
    assert all(each["b"] < each["e"] for each in batches.values())
    for index in range(2):  # what a node does comes after it was sent, and before it is acknowledged
        mine = [each for id, each in batches.items() if id.startswith(f"{index}.")]
        done = [each for each in timed if each["pid"] == 1 + index]
        assert done
        for each in done:
            assert any(b["b"] < each["ts"] and each["ts"] + each["dur"] < b["e"] for b in mine), each
    clocks = collected["otherData"]["clocks"]
    assert [each["offset_us"] for each in clocks.values()] == [0, 0, 0]  # they are one


def test_each_stream_is_a_track(master: Master, tmp_path: Path) -> None:
    old = shoal.Stream("node:0")
    with old:
        before = torch.ones(3, device="node:0") * 2
    with master.trace(tmp_path / "t.json"):
        with old:
            x = before.neg()
        new = shoal.Stream("node:0")
        with new:
            y = x.exp()
        z = y.tanh()
    with old:
        z.sin()
    master.synchronize()
    collected = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {
        each["tid"]: each["args"]["name"] for each in collected if each["pid"] == 1 and each["ph"] == "M"
    }
    slices = [each for each in collected if each["pid"] == 1 and each["ph"] == "X"]
    by_operator = {each["name"]: each for each in slices if each["cat"] == "operation"}
    assert {name: each["tid"] for name, each in by_operator.items()} == {
        "aten.neg": old.stream_id,
        "aten.exp": new.stream_id,
        "aten.tanh": 0,
    }
    assert names[0] == "default stream"
    assert names[new.stream_id] == f"stream {new.stream_id}"
    lines = {"aten.neg": "x = before.neg()", "aten.exp": "y = x.exp()", "aten.tanh": "z = y.tanh()"}
    done = 0.0
    for name, text in lines.items():
        each = by_operator[name]
        assert each["args"]["line"].startswith(_line(text))
        assert each["ts"] >= done  # each waits for the one before
        done = each["ts"] + each["dur"]
    waits = [each for each in slices if each["cat"] == "wait"]
    assert {each["tid"] for each in waits} >= {0, new.stream_id}
    sent = {
        each["id"].split(".")[1] for each in collected if each.get("cat") == "batch" and each["id"][0] == "0"
    }
    assert {str(old.stream_id), str(new.stream_id), "0"} <= sent


def test_clocks_of_other_machines_are_measured(tmp_path: Path) -> None:
    ahead = 5_000_000_000
    made = trace.Trace(tmp_path / "t.json", [], threading.RLock(), "")
    node: Any = SimpleNamespace(ask=lambda now: now("") + ahead)
    offset, error = made._clock(node)
    assert abs(offset - ahead) <= error


def test_what_cannot_be_written_is_told_at_once(master: Master, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # as /dev/null, which a trace must not take the place of
    for path, why in (
        (tmp_path / "no" / "t.json", "No such file"), (tmp_path, "it is a directory"),
        (tmp_path / "pipe", "it is not a regular file"),
    ):  # fmt: skip
        with (
            pytest.raises(shoal.UsageError, match=rf"trace: .* cannot be written: {why}"),
            master.trace(path),
        ):
            raise AssertionError("the block must not begin")
    with (
        master.trace(tmp_path / "t.json"),
        pytest.raises(shoal.UsageError, match="another trace is running: leave its with block first"),
        master.trace(tmp_path / "u.json"),
    ):
        raise AssertionError("the block must not begin")
    with pytest.raises(ValueError, match="of the program"), master.trace(tmp_path / "t.json"):
        raise ValueError("of the program")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["pipe", "t.json"]
    assert all(node.trace is None for node in master._nodes)


def test_a_long_trace_keeps_its_end(monkeypatch: pytest.MonkeyPatch, master: Master, tmp_path: Path) -> None:
    monkeypatch.setattr(at_node, "MAX_TRACE_EVENTS", 3)
    timing = at_node.Timing()
    outcome = BatchReply(0, itertools.count(), compile("", "", "exec"))
    for each in range(5):
        timing.note(outcome, each, "aten.add", 0)
    events, dropped = timing.collected()
    assert [each[3] for each in events] == [2, 3, 4]
    assert dropped == 2
    monkeypatch.setattr(node_trace, "MAX_TRACE_EVENTS", 100)
    with master.trace(tmp_path / "t.json"):
        x = torch.ones(3, device="node:0")
        for _ in range(1000):
            x = x + 1
        x.tolist()
        watch = master._nodes[0].trace
        assert isinstance(watch, node_trace.NodeTrace)
        assert sum(each.size for each in watch.batches) < 100 + watch.batches[0].size
    collected = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    adds = [each for each in collected if each["name"] == "aten.add.Tensor"]
    assert len(adds) == 1000
    assert "line" in adds[-1]["args"]
    assert "line" not in adds[0]["args"]
