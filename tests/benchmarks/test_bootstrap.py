"""The benchmark of large meetings runs from end to end, also where connections are cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.redis_server import needs_redis

ROOT = Path(__file__).resolve().parent.parent.parent


def test_ranks_meet_in_one_process_and_their_server_is_measured(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks" / "bootstrap.py")
    options = ["--ranks", "20", "60", "--rounds", "1", "--kinds", "shoal", "shoal, a tenth cut"]
    command = [sys.executable, script, *options, "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "bootstrap.json").read_text())["results"]
    assert list(results) == ["shoal", "shoal, a tenth cut"]
    for sizes in results.values():
        assert list(sizes) == ["20", "60"]
        for figures in sizes.values():
            assert 0 < figures["seconds"] < 100
            assert figures["server memory, MB"] > 1
    assert results["shoal, a tenth cut"]["60"]["connections cut"] > 0


@needs_redis
def test_ranks_meet_in_redis_too(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks" / "bootstrap.py")
    options = ["--ranks", "20", "--rounds", "1", "--kinds", "Redis", "--out", str(tmp_path)]
    command = [sys.executable, script, *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "bootstrap.json").read_text())["results"]
    assert 0 < results["Redis"]["20"]["seconds"] < 100
    assert results["Redis"]["20"]["server memory, MB"] > 1
