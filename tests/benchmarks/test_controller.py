"""The benchmark of the master-worker mode measures what it says, and compares it with its bars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.quick_workers import quick_workers

ROOT = Path(__file__).resolve().parent.parent.parent
SHORT = {"operations": 50, "fetches": 10, "steps": 2, "large": 1, "soak": 100}


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """The workers of masters are forks."""
    with quick_workers():
        yield


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/controller.py, which is a script and in no package."""
    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    import controller  # type: ignore[import-not-found]

    return controller


def test_a_turn_times_operations_on_nodes_and_what_they_leave(
    controller: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import controller_turns  # type: ignore[import-not-found]

    monkeypatch.setattr(controller_turns, "LARGE", 2**16)
    figures = controller_turns.on_one(controller.Work(**SHORT))
    assert {
        controller.ADD,
        *(f"fetch [us, p{p}]" for p in (10, 50, 99)),
        "MLP step [ms]",
        "MLP step, Adam [ms]",
        "64 MB back [ms]",
        controller.LARGE_MS,
        controller.REPLAY,
        "x + y, soaked [1/s]",
        "master grew [MB]",
        "node grew [MB]",
    } <= set(figures)
    assert figures["more tensors"] <= 2
    assert figures["more calls"] == 0
    assert figures[controller.ADD] > 0


def test_nodes_of_a_place_average_and_copy(controller: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import controller_turns

    monkeypatch.setattr(controller_turns, "LARGE", 2**16)
    monkeypatch.setattr(controller_turns, "GRADIENT", 2**10)
    figures = controller_turns.on_a_place(2, controller.Work(**SHORT))
    others = {"64 MB between nodes [ms]", "average 20 x 1 MB [ms]", controller.DIGITS_MS}
    assert set(figures) == {controller.ADD_TEAM, *others}
    assert all(value > 0 for value in figures.values())


def test_local_torch_runs_the_same_program(controller: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import controller_turns

    monkeypatch.setattr(controller_turns, "LARGE", 2**16)
    figures = controller_turns.local(controller.Work(**SHORT))
    assert {controller.ADD, "fetch [us, p50]", "MLP step [ms]", controller.LARGE_MS} <= set(figures)
    assert all(value > 0 for value in figures.values())


def test_actors_are_called_a_window_at_a_time(
    controller: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import controller_turns

    monkeypatch.setattr(controller_turns, "LARGE", 2**16)
    held, pending, most, done = controller_turns.Held(), 0, 0, 0

    def begin(method: object, *args: object) -> tuple[object, ...]:
        nonlocal pending, most
        pending += 1
        most = max(most, pending)
        return method, args

    def end(call: tuple[object, ...]) -> object:
        nonlocal pending, done
        pending, done = pending - 1, done + 1
        method, args = call
        return method(*args)  # type: ignore[operator]

    work = controller.Work(**{**SHORT, "operations": 1000})
    figures = controller_turns.acted(held, begin, end, work, window=7)
    assert (pending, most) == (0, 7)
    assert done == 1000 + 100 + 10 + 1 + 1 + 1
    assert figures["fetch [us, p50]"] > 0


def test_an_environment_of_its_own_gives_its_figures(tmp_path: Path, controller: ModuleType) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$1" | grep -q controller_turns.py && echo w && echo \'{"x": 1.5}\'\n')
    python.chmod(0o700)
    assert controller.turn_of("controller_turns.py", "ray", str(python), controller.Work()) == {"x": 1.5}


def test_what_was_measured_is_printed_and_written(
    tmp_path: Path,
    controller: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "--rounds",
        "3",
        "--soak",
        "7",
        "--out",
        str(tmp_path / "out"),
        "--picture",
        str(tmp_path / "a.png"),
    ]
    monkeypatch.setattr("sys.argv", ["controller.py", *words])
    taken = {"shoal": [1.0, 9.0, 2.0], "local": [4.0] * 3, "ranks": [5.0] * 3}
    soaked = []

    def turn_of(script: str, name: str, python: str, work: Any) -> dict[str, float]:
        figures = {controller.LARGE_MS: taken[name].pop(0)}
        if name == "shoal" and work.soak:
            soaked.append(work.soak)
            figures["x"] = 3.0
        return figures

    monkeypatch.setattr(controller, "turn_of", turn_of)
    assert controller.main() == 0
    assert soaked == [7]  # once
    result = json.loads((tmp_path / "out").read_text())
    assert result["medians"] == {
        "shoal": {controller.LARGE_MS: 2.0, "x": 3.0},
        "local": {controller.LARGE_MS: 4.0},
        "ranks": {controller.LARGE_MS: 5.0},
    }
    assert list(result["times as good as the bars"].values()) == [2.5]
    assert "2.50 met" in capsys.readouterr().out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
