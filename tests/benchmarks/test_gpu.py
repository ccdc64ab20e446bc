"""The programs of ``make gpu``, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from benchmarks import gpu

from tests.support.quick_launcher import QuickLauncher

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = ROOT / "benchmarks" / "gpu_programs.py"


def test_every_check_passes_on_two_ranks_of_the_cpu(launcher: QuickLauncher) -> None:
    code, out, err = launcher.run(2, str(PROGRAMS), "--device", "cpu")
    assert code == 0, out + err
    figures = json.loads(out.partition("[0] ")[2])
    expected = dict.fromkeys(
        ("collectives", "objects", "ddp", "checkpoint", "fsdp2", "refusal", "latency"), "passed"
    )
    for package in ("accelerate", "lightning"):  # not part of every environment
        expected[package] = "passed" if find_spec(package) else "skipped"
    assert {name: result["outcome"] for name, result in figures.items()} == expected, out
    assert 0 <= figures["ddp"]["distance"] < 1e-4
    assert figures["latency"]["cpu_ms"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    expected = f"shoal's GPU tests need a GPU, and torch {torch.__version__} sees none\n"
    assert done.stderr.endswith(expected)
    assert not list(tmp_path.iterdir())


_TESTS = """
import os, time
import pytest

pytestmark = pytest.mark.gpu

@pytest.fixture
def broken():
    yield
    raise ValueError("broken teardown")

def test_passes(): pass
def test_fails(): assert False, "as it should"
def test_hangs(): time.sleep(100)
def test_dies(): os._exit(7)
def test_tears_down(broken): pass
def test_is_skipped(): pytest.skip("no reason")
def test_comes_last(): pass
"""


def test_a_test_that_hangs_or_dies_does_not_keep_the_others_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "TEST_S", 3)
    file = tmp_path / "test_of_gpus.py"
    file.write_text(_TESTS)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers = gpu: needs a GPU\nfaulthandler_exit_on_timeout = true\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    saved: list[int] = []
    record: gpu.Record = {}

    def save(part: gpu.Record) -> None:
        record.update(part)
        saved.append(len(part["outcomes"]))

    gpu.Runner(environment, time.monotonic() + 100).tests([str(file)], save)
    outcomes = {name.partition("::test_")[2]: outcome for name, outcome in record["outcomes"].items()}
    assert outcomes == {
        "passes": "passed", "fails": "failed", "hangs": "failed", "dies": "failed", "tears_down": "failed",
        "is_skipped": "skipped", "comes_last": "passed",
    }  # fmt: skip
    failures = {name.partition("::test_")[2]: text for name, text in record["failures"].items()}
    assert "as it should" in failures["fails"]
    assert "in test_hangs" in failures["hangs"]
    assert "the process ended with code 7" in failures["dies"]
    assert "broken teardown" in failures["tears_down"]
    assert record["code"] == 1
    assert saved == [7]
