"""The benchmark runs from end to end; what it measures on a busy machine is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.stress
def test_the_benchmark_measures_every_size_and_leaves_a_record(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "all_reduce.py"
    options = ["--only", "shoal", "shoal tcp", "Gloo", "--rounds", "1", "--out", str(tmp_path)]
    readme = (ROOT / "README.md").read_text()
    result = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, timeout=500
    )
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads((tmp_path / "all_reduce-n2.json").read_text())
    assert record["absent"] == {}
    assert set(record["samples"]) == {"shoal registered", "shoal", "shoal tcp", "Gloo"}
    assert all(len(by_size) == 5 for by_size in record["samples"].values())
    assert (tmp_path / "all_reduce-n2.png").stat().st_size > 0
    assert (ROOT / "README.md").read_text() == readme
