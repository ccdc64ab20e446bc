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
    for program in (chaos.collectives, chaos.training):
        trial = play(program, 3, harms=[Harm(1, "kill", 0.05)], ready=True, timeout=60.0)
        assert trial.bad == ""
        assert trial.gone_on[0] is not None


def test_the_table_counts_what_was_done(
    chaos: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harms = (Harm(0, "kill", 0.1), Harm(2, "stop", 0.2))
    moves = (Harm(4, "join", 0.1), Harm(1, "leave", 0.2))
    trials = [
        Trial(0, 4, harms[:1], (0,), 1.0, "", (0.02,)),
        Trial(1, 4, harms, (0, 1, 2), 3.0, "rank 1 raised", (1.2, 1.3)),
        Trial(2, 4, harms, (2,), 2.0, "", (None, 1.5)),
        Trial(3, 4, moves, (), 2.0, "", (None, None), (4,), (0.3,)),
    ]
    row = chaos.summed_up(chaos.ROWS[0], trials)
    page = tmp_path / "failures.md"
    page.write_text(f"before\n{chaos.MARKS[0]}old\n{chaos.MARKS[1]}after\n")
    monkeypatch.setattr(chaos, "PAGE", page)
    chaos.write_page([row])
    chaos.write_page([row])
    assert page.read_text().splitlines()[3:] == [
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| a death in collectives | 4 | 2 | 2 | 1 | 1 | 1 | 20 / 20 / 20 | 1400 / 1500 / 1500 | "
        "300 / 300 / 300 |",
        "<!-- end of chaos -->",
        "after",
    ]
