"""Chaos: what is done to ranks follows from the seed, and what they make of it is judged."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shoal import GroupError, ProcessGroup, UsageError
from shoal.elastic import Samples, Session, State
from shoal.testing import Outcome, chaos

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


def going_on(group: ProcessGroup) -> int:
    while True:
        try:
            group.barrier().wait()
            chaos.mark(group)
            if group.size == 3 - len(chaos.planned()):
                return group.size
        except GroupError:
            group = group.rebuild()  # type: ignore[assignment]


def test_what_is_done_follows_from_the_seed() -> None:
    plans = [chaos.plan(seed, 4, ("kill", "stop"), 3, 2.0, 0.5) for seed in range(200)]
    assert plans == [chaos.plan(seed, 4, ("kill", "stop"), 3, 2.0, 0.5) for seed in range(200)]
    assert len(set(plans)) == 200
    assert {len(plan) for plan in plans} == {1, 2, 3}
    assert {harm.kind for plan in plans for harm in plan} == {"kill", "stop"}
    for plan in plans:
        assert len({harm.rank for harm in plan}) == len(plan)
        times = [harm.after for harm in plan]
        assert len({harm.rank for harm in plan} & set(range(4))) < 4
        assert 0 <= times[0] <= 2.0
        assert all(0 <= later - earlier <= 0.5 for earlier, later in itertools.pairwise(times))


def test_newcomers_may_be_harmed_and_one_of_the_first_ranks_never_is() -> None:
    plans = [chaos.plan(seed, 2, ("kill", "join"), 9, least=5) for seed in range(200)]
    assert {len(plan) for plan in plans} == {5, 6, 7, 8, 9}
    for plan in plans:
        come = [harm.rank for harm in plan if harm.kind == "join"]
        assert come == list(range(2, 2 + len(come)))
        killed = [harm.rank for harm in plan if harm.kind == "kill"]
        assert len(set(killed)) == len(killed)
        assert not {0, 1} <= set(killed)
        for place, harm in enumerate(plan):  # not before it has come
            assert harm.rank < 2 or harm.kind == "join" or harm.rank in [each.rank for each in plan[:place]]
    assert any(rank > 1 for plan in plans for rank in [h.rank for h in plan if h.kind == "kill"])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"kinds": ()}, "kinds="),
        ({"kinds": ("burn",)}, "kinds="),
        ({"most": 0}, "expected 1 to 2"),
        ({"most": 3}, "expected 1 to 2"),
        ({"most": 1, "least": 2}, "least=2"),
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
    assert trial.seconds >= chaos.STOP_DURATION_S - 0.5


def test_ranks_that_do_not_go_on_are_told() -> None:
    trial = chaos.play(giving_up, 3, harms=[chaos.Harm(1, "kill", 0.0)], timeout=PATIENCE)
    assert "rank 0 raised" in trial.bad
    assert "PeerLost" in trial.bad
    assert "rank 1 was ended" not in trial.bad


def test_results_that_differ_are_told() -> None:
    trial = chaos.play(disagreeing, 4, harms=[chaos.Harm(3, "kill", 0.0)], timeout=PATIENCE)
    assert trial.bad == "ranks 0, 2 returned 0; rank 1 returned 1"
    assert trial.lost == (3,)


def test_the_time_until_those_that_are_left_go_on_is_measured() -> None:
    trial = chaos.play(going_on, 3, harms=[chaos.Harm(1, "kill", 0.1)], timeout=PATIENCE)
    assert trial.bad == ""
    (seconds,) = trial.gone_on
    assert seconds is not None
    assert 0 < seconds < trial.seconds


def test_two_groups_of_one_epoch_are_told() -> None:
    members = {0: (0, 1), 1: (0,)}, {0: (0, 1), 1: (1,)}
    outcomes = [
        Outcome(rank, chaos._RankReport(None, {epoch: (each, 0.0) for epoch, each in marks.items()}))
        for rank, marks in enumerate(members)
    ]
    assert chaos._verdict(outcomes, {}) == "two groups in epoch 1: [(0,), (1,)]"


def staying(group: ProcessGroup | None) -> str:
    """Train until a newcomer has come and one rank has left; newcomers that come later wait."""
    state = State(model=nn.Linear(2, 1), optimizer=None, samples=Samples(8, batch=8), moves=0, size=2)
    with Session(state, group=group, max_size=3) as session:
        if group is not None:
            chaos.ready(group)
        for step in session.steps():
            if state.moves == 2:
                break
            with step:
                step.commit()
                state.moves += session.group.size != state.size
                state.size = session.group.size
            time.sleep(0.002)
        if session.left:
            return "left"
    return "stayed"


def test_ranks_join_and_leave_and_who_is_not_needed_ends() -> None:
    harms = [chaos.Harm(2, "join", 0.0), chaos.Harm(1, "leave", 1.0)]
    trial = chaos.play(staying, 2, harms=harms, ready=True, timeout=PATIENCE)
    assert trial.bad == ""
    assert trial.joined == (2,)
    assert trial.lost == ()


def test_the_store_is_killed_and_served_again() -> None:
    plans = [chaos.plan(seed, 2, ("store", "join"), 3, least=2) for seed in range(20)]
    assert {harm.rank for plan in plans for harm in plan if harm.kind == "store"} == {chaos.NO_RANK}
    assert all(chaos.plan(seed, 2, ("store",), 1)[0].rank == chaos.NO_RANK for seed in range(5))
    trial = chaos.play(
        waiting, 2, 1.5, harms=[chaos.Harm(chaos.NO_RANK, "store", 0.0)], timeout=PATIENCE, join_within=1.0
    )
    assert (trial.bad, trial.lost, trial.gone_on) == ("", (), (None,))


def test_newcomers_that_come_late_are_told() -> None:
    done = {
        chaos.Harm(1, "join", 0.0): 10.0,
        chaos.Harm(2, "join", 0.0): 11.0,
        chaos.Harm(3, "join", 1.0): 12.0,
    }
    outcomes = [
        Outcome(0, chaos._RankReport(None, {})),
        Outcome(1, chaos._RankReport(None, {1: ((0, 1), 12.5)}), at=30.0),
        Outcome(2, chaos._RankReport(None, {1: ((0, 1), 19.0)}), at=30.0),
        Outcome(3, chaos._RankReport(None, {}, returned=False), at=30.0),
    ]
    assert chaos._joined_after(outcomes, done, [13.0]) == (2.5, 6.0, None)
    assert chaos._late(outcomes, done, [13.0], 5.0) == [
        "newcomer 2 joined after 6.0 s", "newcomer 3 had not joined after 17.0 s"
    ]  # fmt: skip
