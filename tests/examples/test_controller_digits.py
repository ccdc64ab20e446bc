"""The digits example of one master: the same curve as that of ranks."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shoal
from shoal.testing import run_threads
from tests.examples.load import load
from tests.support.quick_workers import quick_workers


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_workers():
        yield


def test_nodes_train_the_network_that_ranks_train_up_to_rounding() -> None:
    """Batches of 100 images are no multiple of 3, and 1,437 none of 100: parts differ in size."""
    digits, ours = load("digits"), load("controller_digits")
    data, network = digits.load(), digits.make_network(seed=0)

    def rank(group: shoal.ProcessGroup) -> tuple[list[float], list[float]]:
        torch.set_num_threads(1)
        history = digits.train(group, copy.deepcopy(network), data, epochs=1, batch=100, seed=0)
        return history.loss, history.accuracy

    losses, accuracies = run_threads(rank, 3)[0]
    with shoal.init_master_worker(workers=3) as master:
        history = ours.train(master, copy.deepcopy(network), data, epochs=1, batch=100, seed=0)
    assert history.loss == pytest.approx(losses, rel=1e-9)
    assert history.accuracy == accuracies


def test_the_program_shows_what_it_has_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load("digits")
    example, picture = load("controller_digits"), tmp_path / "digits.png"
    arguments = ["controller_digits.py", "--epochs", "1", "--workers", "1", "--out", str(picture)]
    monkeypatch.setattr(sys, "argv", arguments)
    example.main()
    assert "after 1 epochs on 1 node" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
