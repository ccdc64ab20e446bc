"""The counter example: it counts all batches, and prints what its first lines say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import shoal
from shoal.testing import run_threads

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "join_counter.py"


@pytest.fixture(scope="module")
def join_counter() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("join_counter", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("batches", [(3,), (0, 5), (2, 2, 2), (4, 0, 1, 7)])
def test_every_rank_knows_the_batches_of_all(join_counter: ModuleType, batches: tuple[int, ...]) -> None:
    def rank(group: shoal.ProcessGroup) -> int:
        total: int = join_counter.count(group, batches[group.rank]).total
        return total

    assert run_threads(rank, len(batches)) == [sum(batches)] * len(batches)


def test_it_prints_what_its_first_lines_say(join_counter: ModuleType) -> None:
    lines = (join_counter.__doc__ or "").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("    $ shoal run"))
    expected = [line.strip() for line in lines[start + 1 : lines.index("", start)]]
    command = [sys.executable, "-m", "shoal", "run", "-n", "3", str(EXAMPLE)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines() == expected
