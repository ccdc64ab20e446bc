"""The programs of ``make gpu``, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

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
