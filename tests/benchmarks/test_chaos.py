"""The trials of `make chaos`, one of each kind of program, and the table that it writes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from shoal.testing.chaos import Harm, Trial, play

from .scripts import benchmark_script


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark_script("chaos", monkeypatch)


def test_collectives_and_training_outlive_a_death(chaos: ModuleType) -> None:
    for program, is_ready in ((chaos.collectives, False), (chaos.training, True)):
        trial = play(program, 3, harms=[Harm(1, "kill", 0.05)], ready=is_ready, timeout=60.0)
        assert trial.bad == ""


def test_the_table_counts_what_was_done(
    chaos: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harms = (Harm(0, "kill", 0.1), Harm(2, "stop", 0.2))
    trials = [
        Trial(0, 4, harms[:1], (0,), 1.0, ""),
        Trial(1, 4, harms, (0, 1, 2), 3.0, "rank 1 raised"),
        Trial(2, 4, harms, (2,), 2.0, ""),
    ]
    row = chaos.summed_up(chaos.ROWS[0], trials)
    page = tmp_path / "failures.md"
    page.write_text(f"before\n{chaos.MARKS[0]}old\n{chaos.MARKS[1]}after\n")
    monkeypatch.setattr(chaos, "PAGE", page)
    chaos.write_page([row])
    chaos.write_page([row])
    assert page.read_text().splitlines()[3:] == [
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| a death in collectives | 3 | 2 | 2 | 1 | 2.00 | 3.00 |",
        "<!-- end of chaos -->",
        "after",
    ]
