"""Ranks that make the others wait are named."""

from __future__ import annotations

import time
import warnings

import pytest

from shoal import ProcessGroup
from shoal.elastic import Session, Step, stragglers
from shoal.elastic.commit import CommitRecord
from shoal.elastic.stragglers import Stragglers
from shoal.statistics import LateRank
from shoal.testing import run_threads

from .training import train


def rows(*seconds: float) -> list[CommitRecord]:
    return [CommitRecord(0, 0, 0, 0, busy=int(each * 1e6)) for each in seconds]


def no_waits() -> list[LateRank]:
    return []


def compare(steps: list[tuple[float, ...]], rank: int = 0) -> Stragglers:
    found = Stragglers()
    for step in steps:
        found.add(rows(*step), rank, no_waits)
    return found


@pytest.mark.parametrize(
    ("step", "slow"),
    [
        ((0.1, 0.1, 0.2), (2,)),
        ((0.3, 0.1, 0.1, 0.3, 0.1), (0, 3)),
        ((0.1, 0.1, 0.14), ()),
        ((0.001, 0.001, 0.009), ()),  # a few milliseconds
        ((0.1, 0.4), (1,)),
        ((0.1,), ()),
    ],
)
def test_a_rank_that_computes_longer_than_the_others_is_found(
    step: tuple[float, ...], slow: tuple[int, ...]
) -> None:
    assert compare([step] * 19, rank=1).found == ()
    assert compare([step] * 20, rank=1).found == slow


def test_a_rank_that_is_held_up_for_some_steps_is_none() -> None:
    assert compare([(0.1, 0.1, 9.0)] * 9 + [(0.1, 0.1, 0.1)] * 11, rank=1).found == ()


def test_each_is_named_once_in_a_group_and_by_rank_0_alone() -> None:
    slow = [(0.1, 0.3, 0.1)] * 20
    with pytest.warns(UserWarning, match=r"rank 1 of 3 computes 3\.0 times as long as the others") as said:
        found = compare(slow * 2)
    assert len(said) == 1
    found.reset()
    assert found.found == ()
    for step in slow[:-1]:
        found.add(rows(*step), 0, no_waits)
    with pytest.warns(UserWarning, match="rank 1 of 3"):
        found.add(rows(*slow[-1]), 0, no_waits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compare(slow, rank=2).found == (1,)


def test_the_warning_states_how_long_rank_0_waited() -> None:
    found = Stragglers()
    waits = [LateRank(1, 5, 9.0), LateRank(2, 100, 50.0)]
    for number in range(40):
        slow = (0.1, 0.3, 0.1) if number >= 20 else (0.1, 0.1, 0.1)
        if number < 39:
            found.add(rows(*slow), 0, lambda: waits)
    now = [LateRank(2, 100, 50.0), LateRank(1, 26, 13.25)]
    with pytest.warns(
        UserWarning, match=r"which wait for it: rank 0 waited 4\.25 s for it, in 21 operations$"
    ):
        found.add(rows(0.1, 0.3, 0.1), 0, lambda: now)


def test_the_others_time_does_not_count_in_which_backward_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "_WINDOW_STEPS", 6)
    found = {}

    def sleeping(group: ProcessGroup) -> None:
        me = group.rank

        def visit(here: str, step: Step) -> None:
            if here == "before backward" and me == 1:
                time.sleep(0.5)
            if here == "after the last":
                assert isinstance(step._session, Session)
                found[me] = step._session.stragglers

        train(group, visit, until=6)

    with pytest.warns(UserWarning, match=r"rank 1 of 3 .* which wait for it: rank 0 waited \d") as said:
        run_threads(sleeping, 3)
    words = str(said[0].message).split()
    assert float(words[words.index("waited") + 1]) > 1  # seconds, of 3 that rank 1 slept
    assert found == dict.fromkeys(range(3), (1,))
