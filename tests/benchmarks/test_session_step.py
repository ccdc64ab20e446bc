"""The benchmark of a step in a session, beside one without."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from .scripts import benchmark_script


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark_script("session_step", monkeypatch)


def test_it_measures_both_kinds_of_steps_and_leaves_a_record(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["", "--steps", "6", "--width", "16", "--out", str(out)])
    assert bench.main() == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["width"], row["steps"]) == (16, 6)
    assert row["plain_ms"] > 0
    assert row["interval"][0] <= row["ratio"] <= row["interval"][1]


def test_the_ratio_is_that_of_medians(bench: ModuleType) -> None:
    pairs = [(1.0, 1.1), (2.0, 2.2), (100.0, 2.2)]
    assert bench.ratio(pairs) == pytest.approx(1.1)
    low, high = bench.interval(pairs, 100)
    assert low <= 1.1 <= high
