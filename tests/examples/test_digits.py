"""The digits example: the same result on any number of ranks, a good one, and a picture of it."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import shoal
from shoal.testing import run_threads
from tests.examples.load import EXAMPLES, load

EXAMPLE = EXAMPLES / "digits.py"


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    return load("digits")


@pytest.mark.parametrize("batch", [32, 50])
def test_1_2_and_4_ranks_train_the_same_network_up_to_rounding(digits: ModuleType, batch: int) -> None:
    """50 images are not a multiple of 4, and 1,437 of neither: the ranks' parts differ in size."""
    data, network = digits.load(), digits.make_network(seed=0)

    def rank(group: shoal.ProcessGroup) -> tuple[nn.Module, list[float], list[float]]:
        torch.set_num_threads(1)
        own = copy.deepcopy(network)
        history = digits.train(group, own, data, epochs=2, batch=batch, seed=0)
        return own, history.loss, history.accuracy

    alone, losses, accuracies = run_threads(rank, 1)[0]
    assert losses[1] < losses[0]
    for size in (2, 4):
        for trained, loss, accuracy in run_threads(rank, size):
            assert loss == pytest.approx(losses, rel=1e-9)
            assert accuracy == accuracies
            for a, b in zip(trained.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def _run(command: list[str], picture: Path) -> float:
    """The test accuracy in percent that the example prints."""
    result = subprocess.run(
        [*command, "--out", str(picture)], capture_output=True, text=True, timeout=180, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    (accuracy,) = re.findall(r"test accuracy ([\d.]+) %", result.stdout)
    return float(accuracy)


def test_two_processes_reach_97_percent_and_draw_a_picture(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", str(EXAMPLE)]
    assert _run(command, tmp_path / "new" / "two.png") >= 97


def test_the_same_file_runs_alone(tmp_path: Path) -> None:
    assert _run([sys.executable, str(EXAMPLE), "--epochs", "1"], tmp_path / "alone.png") > 10
