"""The benchmark of calls measures what it says, and divides shoal's medians by torch's."""

from __future__ import annotations

import json
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


def test_calls_are_timed_between_two_workers(tmp_path: Path, rpc: ModuleType) -> None:
    arguments = (f"file://{tmp_path}/store", (5, 20, 4), str(tmp_path / "out.json"))
    other = threading.Thread(target=rpc.over_shoal, args=(1, *arguments))
    other.start()
    rpc.over_shoal(0, *arguments)
    other.join()
    figures = json.loads((tmp_path / "out.json").read_text())
    assert set(figures) == {"one call [us, p50]", "one call [us, p95]", "at once [calls/s]"}
    assert all(value > 0 for value in figures.values())


def test_the_ratio_is_that_of_the_medians(rpc: ModuleType) -> None:
    rounds = {"shoal": [{"x": v} for v in (1.0, 9.0, 2.0)], "torch": [{"x": v} for v in (4.0, 3.0, 90.0)]}
    assert rpc.summary(rounds) == ({"shoal": {"x": 2.0}, "torch": {"x": 4.0}}, {"x": 0.5})
