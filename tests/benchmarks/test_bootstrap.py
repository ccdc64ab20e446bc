"""The benchmark of large meetings runs from end to end, also where connections are cut."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.etcd_server import needs_etcd
from tests.support.redis_server import needs_redis

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "bootstrap.py"


def test_ranks_meet_in_one_process_and_their_server_is_measured(tmp_path: Path) -> None:
    options = ["--ranks", "20", "60", "--rounds", "1", "--kinds", "shoal", "shoal, a tenth cut"]
    command = [sys.executable, str(SCRIPT), *options, "--out", str(tmp_path)]
    command += ["--picture", str(tmp_path / "bootstrap.png")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "bootstrap.png").stat().st_size > 1000
    results = json.loads((tmp_path / "bootstrap.json").read_text())["results"]
    assert list(results) == ["shoal", "shoal, a tenth cut"]
    for sizes in results.values():
        assert list(sizes) == ["20", "60"]
        for figures in sizes.values():
            assert 0 < figures["seconds"] < 100
            assert figures["server memory, MB"] > 1
    assert results["shoal, a tenth cut"]["60"]["connections cut"] > 0


@pytest.mark.parametrize(
    "kind", [pytest.param("etcd", marks=needs_etcd), pytest.param("Redis", marks=needs_redis)]
)
def test_ranks_meet_on_other_servers_too(kind: str, tmp_path: Path) -> None:
    options = ["--ranks", "20", "--rounds", "1", "--kinds", kind, "--out", str(tmp_path)]
    command = [sys.executable, str(SCRIPT), *options, "--picture", str(tmp_path / "bootstrap.png")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "bootstrap.json").read_text())["results"][kind]["20"]
    assert 0 < figures["seconds"] < 100
    assert figures["server memory, MB"] > 1


def test_a_large_meeting_is_held_against_its_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    bootstrap = importlib.import_module("bootstrap")
    within = dict.fromkeys(bootstrap.FIGURES, 1.0)
    record = {"shoal": {"10000": within, "100": within}, "torch TCPStore": {"100": within}}
    assert bootstrap.held_against_bars(record) == {
        "shoal": {"seconds": (1.0, 10.0), "server CPU, s": (1.0, 3.0), "server memory, MB": (1.0, 150.0)}
    }
