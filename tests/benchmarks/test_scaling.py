"""The scaling benchmark runs from end to end, and tells a steep growth from a linear one."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = (8, 16, 64)


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/scaling.py, which is a script and in no package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scaling  # type: ignore[import-not-found]

    return scaling


def test_it_measures_every_quantity_and_leaves_a_record(tmp_path: Path, scaling: ModuleType) -> None:
    script = str(ROOT / "benchmarks" / "scaling.py")
    options = ["--ranks", "2", "3", "--rounds", "1", "--sample", "0.001", "--out", str(tmp_path)]
    result = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, timeout=600)
    assert not result.stderr, result.stderr
    record = json.loads((tmp_path / "scaling.json").read_text())
    assert list(record["results"]) == ["2", "3"]
    for measured in record["results"].values():
        assert list(measured) == list(scaling.rows_of_interest())
        assert measured["file descriptors"] > 0
        assert measured["threads"] >= 2
        assert 0 < measured["shared memory, by the rank"] < 2**20
        assert 0 < measured["memory (USS)"] < 16e6  # an idle rank, beyond torch
    assert (tmp_path / "scaling.png").stat().st_size > 0


def test_what_grows_faster_than_linearly_is_named(scaling: ModuleType) -> None:
    results = {size: dict.fromkeys(scaling.rows_of_interest(), 1.0) for size in SIZES}
    for size in SIZES:
        results[size]["page tables"] = size**1.5
        results[size]["file descriptors"] = 2.0 * size
    assert scaling.growth(results, "page tables", 2) == pytest.approx(1.5)
    assert scaling.show(results, 2, Console(file=io.StringIO())) == ["page tables"]


def test_time_is_shared_by_the_ranks_of_a_core(scaling: ModuleType) -> None:
    results = {size: dict.fromkeys(scaling.rows_of_interest(), float(size)) for size in SIZES}
    assert scaling.growth(results, "barrier: CPU", 2) == pytest.approx(1)
    assert scaling.growth(results, "barrier: time", 2) == pytest.approx(0)
