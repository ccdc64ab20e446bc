"""The benchmark of the master-worker mode measures what it says, and compares it with its bars."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SHORT = {"operations": 50, "fetches": 10, "steps": 2, "large": 1, "soak": 100}


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/controller.py, which is a script and in no package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
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
        controller.LARGE_MS,
        "x + y, soaked [1/s]",
        "master grew [MB]",
        "node grew [MB]",
    } <= set(figures)
    assert figures["more tensors"] <= 2
    assert figures["more calls"] == 0
    assert figures[controller.ADD] > 0


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
    assert controller.turn("ray", str(python), controller.Work()) == {"x": 1.5}


def test_medians_are_taken_over_the_rounds_that_have_a_figure(tmp_path: Path, controller: ModuleType) -> None:
    rounds = {
        "shoal": [{controller.LARGE_MS: v} for v in (1.0, 9.0, 2.0)],
        "local": [{controller.LARGE_MS: 4.0}],
    }
    rounds["shoal"][-1]["x"] = 3.0
    medians = controller.medians_of(rounds)
    assert medians == {"shoal": {controller.LARGE_MS: 2.0, "x": 3.0}, "local": {controller.LARGE_MS: 4.0}}
    ratios = controller.against_bars(medians, controller.BARS)
    assert list(ratios.values()) == [2.5]
    controller.draw(medians, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
