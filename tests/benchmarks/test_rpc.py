"""The benchmark of calls measures what it says, and divides shoal's medians by torch's."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def rpc(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/rpc.py, which is a script and in no package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import rpc  # type: ignore[import-not-found]

    return rpc


def played(rpc: ModuleType, name: str, tmp_path: Path) -> dict[str, float]:
    """The figures of one turn, whose two processes are threads."""
    arguments = (str(tmp_path), rpc.Work(20, 20, 4, 1), str(tmp_path / "out.json"))
    other = threading.Thread(target=rpc.OVER[name], args=(1, *arguments))
    other.start()
    rpc.OVER[name](0, *arguments)
    other.join()
    figures: dict[str, float] = json.loads((tmp_path / "out.json").read_text())
    return figures


@pytest.mark.parametrize("name", ["shoal", "shoal tcp"])
def test_calls_are_timed_between_two_workers(
    tmp_path: Path, rpc: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(rpc, "LARGE", 2**16)
    figures = played(rpc, name, tmp_path)
    assert set(figures) == {
        *(f"{what} [us, p{p}]" for what in ("no-op", "echo 20x20") for p in (10, 50, 99)),
        "1 caller [calls/s]",
        "4 callers [calls/s]",
        "64 MB [ms]",
    }
    assert all(value > 0 for value in figures.values())


def test_the_floor_sends_the_same_through_bare_sockets(
    tmp_path: Path, rpc: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rpc_floor.LARGE", 2**16)
    figures = played(rpc, "floor", tmp_path)
    assert set(figures) == {
        *(f"{kind} no-op [us, p{p}]" for kind in ("unix", "tcp") for p in (10, 50, 99)),
        *(f"64 MB over {kind}, {how} [ms]" for kind in ("unix", "tcp") for how in ("warm", "fresh")),
        "64 MB to shared memory, warm [ms]",
    }
    assert all(value > 0 for value in figures.values())


def test_a_raw_loop_fills_as_much_memory_as_it_sends(rpc: ModuleType) -> None:
    import rpc_floor  # type: ignore[import-not-found]

    body = bytes(2**22 - 1) + b"\7"  # more than a socket takes at once
    here, there = socket.socketpair()
    with here, there:
        answering = threading.Thread(target=rpc_floor.answer, args=(there,))
        answering.start()
        try:
            assert rpc_floor.ping(here, body, rpc_floor.WARM)() == b"\7"
            assert rpc_floor.ping(here, body, rpc_floor.FRESH)() == b"\7"
        finally:
            here.close()
            answering.join()


def test_a_figure_is_so_many_times_as_good_as_its_bar(rpc: ModuleType) -> None:
    from contest import against_bars  # type: ignore[import-not-found]

    ratios = against_bars(
        {
            "shoal": {"1 caller [calls/s]": 30_000.0, "64 MB [ms]": 20.0},
            "shoal tcp": {"64 MB [ms]": 20.0, "no-op [us, p50]": 300.0},
            "floor": {"64 MB over tcp, warm [ms]": 16.0, "64 MB to shared memory, warm [ms]": 8.0},
        },
        rpc.BARS,
    )
    assert {what: round(ratio, 9) for what, ratio in ratios.items()} == {
        "shoal: 1 caller [calls/s] at least 20,000": 1.5,
        "shoal: 64 MB [ms] at most 1.25 of floor 64 MB to shared memory, warm [ms]": 0.5,
        "shoal tcp: 64 MB [ms] at most 1.25 of floor 64 MB over tcp, warm [ms]": 1.0,
        "shoal tcp: no-op [us, p50] at most 150": 0.5,
    }


def test_an_environment_of_its_own_gives_its_figures(tmp_path: Path, rpc: ModuleType) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$1" | grep -q rpc_actors.py && echo words && echo \'{"x": 1.5}\'\n')
    python.chmod(0o700)
    assert rpc.turn_of("rpc_actors.py", "ray", str(python), rpc.Work()) == {"x": 1.5}


def test_the_ratios_are_those_of_the_medians(rpc: ModuleType) -> None:
    rounds = {"shoal": [{"x": v} for v in (1.0, 9.0, 2.0)], "torch": [{"x": v} for v in (4.0, 3.0, 90.0)]}
    medians = {"shoal": {"x": 2.0}, "torch": {"x": 4.0}}
    assert rpc.medians_of(rounds) == medians
    assert rpc.to_torch(medians) == {"shoal": {"x": 0.5}}
