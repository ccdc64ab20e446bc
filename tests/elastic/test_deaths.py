"""Deaths: real processes are killed at every point of a step, and at any moment."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import pytest

from shoal import ProcessGroup, TooFewRanks
from shoal.elastic import Step
from shoal.testing import Outcome, faults, no_leaks, processes

from .training import STEPS, Log, assert_as_undisturbed, train

PATIENCE = 60.0
LONGER = 30


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


#: step, point and rank of the first group
Death = tuple[int, str, int]


def dying(group: ProcessGroup, deaths: list[Death]) -> Log:
    """Train; ranks die one after another."""
    mine = [(number, point) for number, point, rank in deaths if rank == group.rank]

    def visit(here: str, step: Step) -> None:
        if (step.number, here) in mine:
            die()
        if here == "before backward" and (step.number, "with a bucket reduced") in mine:
            faults.die_at(group, "finished")
        if here == "before commit" and (step.number, "inside commit") in mine:
            faults.die_at(group, "finished")

    return train(group, visit)


def survivors(outcomes: list[Outcome], deaths: int) -> list[Log]:
    """The logs of all but ``deaths`` ranks that were killed."""
    killed = [each for each in outcomes if each.exitcode == -signal.SIGKILL]
    others = [each for each in outcomes if each not in killed]
    assert all(each.ok for each in others), "\n".join(each.describe() for each in others)
    assert len(killed) == deaths, [each.describe() for each in outcomes]
    return [each.value for each in others]


@pytest.mark.parametrize(
    "deaths",
    [
        [(2, "before backward", 0), (5, "in backward", 2), (9, "inside commit", 1)],
        [(2, "with a bucket reduced", 3), (6, "before commit", 0), (9, "after commit", 2)],
        [(0, "inside commit", 2), (1, "between", 1), (STEPS - 1, "inside commit", 0)],
        [(1, "after update", 0), (2, "inside commit", 3), (STEPS - 1, "after commit", 1)],
    ],
)
def test_a_death_at_each_point_costs_one_step_at_most(deaths: list[Death]) -> None:
    with no_leaks(), processes(dying, 4, deaths, timeout=PATIENCE) as ranks:
        logs = survivors(ranks.join(), len(deaths))
    assert_as_undisturbed(logs)
    moments = {moment for number, _, _ in deaths for moment in (number, number + 1)}
    for log in logs:
        assert all(event.step in moments for event in log.events)
        sizes = [4, *(event.size for event in log.events)]  # two deaths may be one event
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[-1] in (1, 2)  # whether the last death is noticed before the end


@pytest.mark.parametrize("topology", [{"transport": "tcp"}, {"hosts": "aabb"}])
def test_a_death_across_hosts_costs_one_step_at_most(topology: dict[str, Any]) -> None:
    death = (6, "inside commit", 1)
    with no_leaks(), processes(dying, 4, [death], timeout=PATIENCE, **topology) as ranks:
        logs = survivors(ranks.join(), 1)
    assert_as_undisturbed(logs)


def stopping(group: ProcessGroup, point: str) -> Log:
    """Train with at least two ranks; rank 1 is stopped at ``point`` of a step."""
    me = group.rank

    def visit(here: str, step: Step) -> None:
        if me == 1 and (step.number, here) == (6, point):
            os.kill(os.getpid(), signal.SIGSTOP)

    return train(group, visit, min=2)


@pytest.mark.parametrize("point", ["in backward", "before commit"])
def test_others_go_on_without_a_rank_that_is_stopped_and_end_it(point: str) -> None:
    with no_leaks(), processes(stopping, 3, point, timeout=PATIENCE) as ranks:
        first, stopped, last = ranks.join()
    assert_as_undisturbed([first.value, last.value])
    assert stopped.describe() == "rank 1 was ended by SIGKILL"


def dying_at_any_moment(group: ProcessGroup, seed: int) -> Log:
    """Train; two of the ranks die at any moment, often of the same step."""
    choose, me = random.Random(seed), group.rank
    victims = choose.sample(range(group.size), 2)
    first = choose.randrange(LONGER - 5)
    numbers = [first, choose.choice([first, first + 1, choose.randrange(LONGER - 5)])]
    delays = [choose.uniform(0.0, 0.006) for _ in victims]
    started: list[threading.Timer] = []

    def visit(here: str, step: Step) -> None:
        if me not in victims:
            return
        which = victims.index(me)
        if not started and here == "between" and step.number == numbers[which]:
            started.append(threading.Timer(delays[which], die))
            started[0].start()
        if here == "after the last":
            started[0].join()  # others wait for it

    return train(group, visit, until=LONGER)


@pytest.mark.parametrize("seed", range(5))
def test_two_deaths_at_any_moment(seed: int) -> None:
    with no_leaks(), processes(dying_at_any_moment, 4, seed, timeout=PATIENCE) as ranks:
        logs = survivors(ranks.join(), 2)
    assert_as_undisturbed(logs, until=LONGER)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(5, 20))
def test_many_deaths_at_any_moment(seed: int) -> None:
    test_two_deaths_at_any_moment(seed)


def below_the_least(group: ProcessGroup) -> str:
    """Train with at least two ranks, of which one dies."""
    me = group.rank

    def visit(_: str, step: Step) -> None:
        if me == 1 and step.number == 3:
            die()

    with pytest.raises(TooFewRanks) as caught:
        train(group, visit, min=2)
    return str(caught.value)


def test_fewer_ranks_than_the_session_may_have_raise() -> None:
    with no_leaks(), processes(below_the_least, 2, timeout=PATIENCE) as ranks:
        (said,) = survivors(ranks.join(), 1)
    assert "1 of 2 ranks would remain, and min_size is 2" in str(said)
