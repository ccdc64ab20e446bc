"""The benchmark of the algorithms between simulated hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.networks import unavailable

from .scripts import BENCHMARKS


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
def test_it_measures_every_algorithm_on_a_shaped_link_and_leaves_a_record(
    tmp_path: Path, operation: str
) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    out = tmp_path / "hosts.json"
    options = ["--hosts", "2", "--ranks", "2", "--sizes", "8", "4096", "--rounds", "2", "--megabits", "1000"]
    command = [sys.executable, BENCHMARKS / "hosts.py", *options, "--no-gloo", "--operation", operation]
    shown = subprocess.run([*command, "--out", out], capture_output=True, text=True, timeout=240)
    assert shown.returncode == 0, shown.stderr
    assert f"{operation}, 2 hosts of 2, 1000 Mbit/s, delay 0 us" in shown.stdout
    record = json.loads(out.read_text())
    assert (record["operation"], record["megabits"]) == (operation, 1000.0)
    times = record["results"]["2x2"]
    assert list(times) == ["8", "4096"]
    for each in times.values():
        assert list(each) == ["direct", "doubling", "halving", "ring", "auto"]
        for rounds in each.values():
            assert {kind: len(times) for kind, times in rounds.items()} == {"seconds": 2, "cpu": 2}
            assert all(seconds > 0 for times in rounds.values() for seconds in times)
