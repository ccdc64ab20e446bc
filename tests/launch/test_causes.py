"""Causes are told from consequences by what the ranks reported and how they ended."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from shoal.failure_report import Report
from shoal.launch.output.causes import cause, exit_code, origin


@dataclass
class Ended:
    index: int
    status: int | None
    ended_at: float
    reports: tuple[Report, ...] = ()
    stopped: bool = False


def ranks(*ends: tuple[int | None, float, list[Report]], stopped: tuple[int, ...] = ()) -> list[Ended]:
    return [
        Ended(index, status, math.inf if status is None else at, tuple(reports), index in stopped)
        for index, (status, at, reports) in enumerate(ends)
    ]


def told(at: float, *others: int) -> Report:
    return Report("told", at, others)


def failed(at: float) -> Report:
    return Report("failed", at)


def left(at: float) -> Report:
    return Report("left", at)


def ended(at: float, code: int) -> Report:
    return Report("ended", at, code=code)


def test_without_reports_the_first_to_end_is_the_cause() -> None:
    job = ranks((0, 1.0, []), (1, 9.0, []), (5, 8.0, []))
    assert (cause(job), exit_code(job, 2)) == (2, 5)


def test_a_rank_that_raised_is_the_cause_though_it_ends_last() -> None:
    slow = [left(5.0), failed(5.1), ended(5.1, 1)]
    job = ranks((7, 5.3, [told(5.2, 1)]), (1, 6.0, slow), (1, 5.4, [told(5.3, 0)]))
    assert cause(job) == 1
    assert [origin(job, rank) for rank in job] == [1, 1, 1]
    assert exit_code(job, 1) == 1


def test_while_the_cause_still_ends_it_is_named_already() -> None:
    job = ranks((1, 5.3, [told(5.2, 1)]), (None, 0.0, [left(5.0)]))
    assert cause(job) == 1


def test_a_rank_that_died_without_a_word_is_named_by_who_lost_it_even_before_its_end_is_seen() -> None:
    for status in (None, -9, 3):
        job = ranks((1, 5.3, [told(5.2, 1), failed(5.25)]), (status, 5.4, []))
        assert cause(job) == 1


def test_a_rank_that_left_in_good_order_and_ended_well_is_not_the_cause() -> None:
    job = ranks((1, 5.3, [told(5.2, 1), failed(5.25)]), (0, 5.1, [left(5.0)]))
    assert (cause(job), exit_code(job, 0)) == (0, 1)


def test_what_a_rank_was_told_long_ago_is_no_reason() -> None:
    """Rank 1 left a group, which rank 0 survived; then rank 0 raised, which ended rank 1."""
    job = ranks((1, 9.2, [told(1.1, 1), failed(9.0)]), (1, 9.3, [left(1.0), told(9.1, 0), failed(9.2)]))
    assert cause(job) == 0
    assert [origin(job, rank) for rank in job] == [0, 0]


def test_a_rank_that_closes_its_group_while_an_exception_is_on_its_way_is_the_cause() -> None:
    job = ranks((1, 5.1, [told(5.05, 1), failed(5.06)]), (1, 6.0, [left(5.0), failed(5.2)]))
    assert cause(job) == 1


def test_a_rank_that_had_to_be_ended_keeps_the_code_that_python_gave_it() -> None:
    hangs = [failed(5.0), ended(5.0, 130)]
    job = ranks((4, 5.3, [told(5.2, 1)]), (-15, 10.0, hangs), stopped=(1,))
    assert (cause(job), exit_code(job, 1)) == (1, 130)


def test_if_the_cause_ends_well_in_the_end_the_code_is_that_of_its_first_consequence() -> None:
    job = ranks((4, 5.3, [told(5.2, 1)]), (0, 6.0, [failed(5.0)]), (3, 5.4, [told(5.2, 1)]))
    assert (cause(job), exit_code(job, 1)) == (1, 4)


def test_a_failure_that_a_rank_got_over_and_nobody_heard_of_is_not_the_cause() -> None:
    job = ranks((1, 5.3, [failed(5.2)]), (0, 6.0, [failed(5.0)]))
    assert cause(job) == 0


_times = st.floats(0, 10)


@st.composite
def jobs(draw: st.DrawFn) -> list[Ended]:
    """Whatever hostile ranks may report."""
    size = draw(st.integers(1, 4))
    others = st.lists(st.integers(0, size - 1), max_size=3).map(tuple)
    kinds = st.sampled_from(["failed", "left", "told", "ended"])
    report = st.builds(Report, kinds, _times, others, st.none() | st.integers(1, 255))
    reports = st.lists(report, max_size=4).map(lambda found: sorted(found, key=lambda each: each.at))
    one = st.tuples(st.sampled_from([None, 0, 3, -9, -15]), _times, reports)
    job = ranks(*draw(st.lists(one, min_size=size, max_size=size)))
    for rank in job:
        rank.stopped = rank.status in (-9, -15) and draw(st.booleans())
    return job


@given(jobs())
def test_whatever_is_reported_an_answer_is_found_if_a_rank_failed(job: list[Ended]) -> None:
    found = cause(job)
    if any(rank.status not in (None, 0) and not rank.stopped for rank in job):
        assert found is not None
        if all(rank.status is not None for rank in job):
            assert exit_code(job, found) != 0
