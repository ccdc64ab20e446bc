"""The digits example: the same result on any number of ranks, a good one, and a picture of it."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import shoal
from shoal.testing import run_threads
from tests.examples.load import EXAMPLES, load
from tests.support.quick_launcher import QuickLauncher


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    return load("digits")


def test_1_2_and_4_ranks_train_the_same_network_up_to_rounding(digits: ModuleType) -> None:
    """Batches of 50 images are no multiple of 4, and 1,437 none of 50: the ranks' parts differ in size."""
    data, network = digits.load(), digits.make_network(seed=0)

    def rank(group: shoal.ProcessGroup) -> tuple[nn.Module, list[float], list[float]]:
        torch.set_num_threads(1)
        own = copy.deepcopy(network)
        history = digits.train(group, own, data, epochs=2, batch=50, seed=0)
        return own, history.loss, history.accuracy

    alone, losses, accuracies = run_threads(rank, 1)[0]
    assert losses[1] < losses[0]
    for size in (2, 4):
        for trained, loss, accuracy in run_threads(rank, size):
            assert loss == pytest.approx(losses, rel=1e-9)
            assert accuracy == accuracies
            for a, b in zip(trained.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def _accuracy(out: str, picture: Path) -> float:
    """The test accuracy in percent that the example printed; it also drew a picture."""
    assert picture.read_bytes().startswith(b"\x89PNG")
    (accuracy,) = re.findall(r"test accuracy ([\d.]+) %", out)
    return float(accuracy)


def test_two_processes_reach_97_percent_and_draw_a_picture(launcher: QuickLauncher, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "two.png"
    code, out, err = launcher.run(2, str(EXAMPLES / "digits.py"), "--out", str(picture))
    assert code == 0, out + err
    assert _accuracy(out, picture) >= 97


def test_the_same_file_runs_alone(
    digits: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "alone.png"
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # of the other tests too
    monkeypatch.setattr("sys.argv", ["digits.py", "--epochs", "1", "--out", str(picture)])
    digits.main()
    assert _accuracy(capsys.readouterr().out, picture) > 10
