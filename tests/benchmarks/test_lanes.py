"""The benchmark of lanes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.networks import unavailable

from .scripts import BENCHMARKS


def test_it_measures_every_number_of_lanes_on_one_host_and_between_hosts(tmp_path: Path) -> None:
    out = tmp_path / "lanes.json"
    options = ["--lanes", "1", "2", "--sizes", "8", "4096", "--rounds", "2", "--operations", "3"]
    command = [sys.executable, BENCHMARKS / "lanes.py", *options, "--out", out]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert shown.returncode == 0, shown.stderr
    titles = ["3 all-reduces, 2 ranks on one host"]
    if not unavailable():
        titles.append("3 all-reduces, 2 hosts, no limit, delay 0 us")
    results = json.loads(out.read_text())["results"]
    assert list(results) == titles
    for times in results.values():
        assert {size: list(lanes) for size, lanes in times.items()} == {"8": ["1", "2"], "4096": ["1", "2"]}
        for lanes in times.values():
            for rounds in lanes.values():
                assert {kind: len(seconds) for kind, seconds in rounds.items()} == {"batch": 2, "behind": 2}
                assert all(seconds > 0 for found in rounds.values() for seconds in found)
