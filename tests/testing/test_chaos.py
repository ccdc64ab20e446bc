"""Chaos: what is done to ranks follows from the seed, and what they make of it is judged."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from shoal import GroupError, ProcessGroup, UsageError
from shoal.testing import chaos

PATIENCE = 60.0


def waiting(group: ProcessGroup, seconds: float) -> float:
    """Wait for the others until one is lost."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            group.barrier().wait()
        except GroupError:
            break
    return seconds


def giving_up(group: ProcessGroup) -> None:
    while True:
        group.barrier().wait()


def disagreeing(group: ProcessGroup) -> int:
    waiting(group, 10.0)
    return group.rank % 2


def test_what_is_done_follows_from_the_seed() -> None:
    plans = [chaos.plan(seed, 4, ("kill", "stop"), 3, 2.0, 0.5) for seed in range(200)]
    assert plans == [chaos.plan(seed, 4, ("kill", "stop"), 3, 2.0, 0.5) for seed in range(200)]
    assert len(set(plans)) == 200
    assert {len(plan) for plan in plans} == {1, 2, 3}
    assert {harm.kind for plan in plans for harm in plan} == {"kill", "stop"}
    for plan in plans:
        assert len({harm.rank for harm in plan}) == len(plan)
        times = [harm.after for harm in plan]
        assert 0 <= times[0] <= 2.0
        assert all(0 <= later - earlier <= 0.5 for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"kinds": ()}, "kinds="),
        ({"kinds": ("burn",)}, "kinds="),
        ({"most": 0}, "expected 1 to 2"),
        ({"most": 3}, "expected 1 to 2"),
    ],
)
def test_what_cannot_be_done_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        chaos.plan(0, 3, **how)


def test_ranks_that_go_on_are_right_whatever_became_of_the_others(tmp_path: Path) -> None:
    record = tmp_path / "trials.jsonl"
    trials = chaos.trials(
        waiting, 3, 10.0, count=2, most=2, within=0.2, apart=0.1, record=record, timeout=PATIENCE
    )
    assert [trial.bad for trial in trials] == ["", ""]
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["seed"] for line in lines] == [0, 1]
    assert [len(line["harms"]) for line in lines] == [len(trial.harms) for trial in trials]


def test_a_rank_that_was_stopped_goes_on() -> None:
    trial = chaos.play(waiting, 2, 10.0, harms=[chaos.Harm(1, "stop", 0.0)], timeout=PATIENCE)
    assert trial.bad == ""
    assert trial.seconds >= chaos.STANDSTILL - 0.5


def test_ranks_that_do_not_go_on_are_told() -> None:
    trial = chaos.play(giving_up, 3, harms=[chaos.Harm(1, "kill", 0.0)], timeout=PATIENCE)
    assert "rank 0 raised" in trial.bad
    assert "PeerLost" in trial.bad
    assert "rank 1 was ended" not in trial.bad


def test_results_that_differ_are_told() -> None:
    trial = chaos.play(disagreeing, 4, harms=[chaos.Harm(3, "kill", 0.0)], timeout=PATIENCE)
    assert trial.bad == "ranks 0, 2 returned 0; rank 1 returned 1"
    assert trial.lost == (3,)
