"""Ranks die, and others are late, at any point of a growth: all healthy ranks train on."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from shoal import ProcessGroup
from shoal.elastic import Session, session
from shoal.elastic.membership import admission
from shoal.elastic.membership.admission import JoiningProcess
from shoal.elastic.membership.candidates import CandidateRegistry
from shoal.elastic.membership.members import SessionMembers
from shoal.group.agreement import AgreementClient
from shoal.testing import no_leaks, processes

from .test_newcomers import PATIENCE, logs_of, training
from .training import Log, assert_as_undisturbed

#: a rank passes a point before and after each of these
POINTS: list[tuple[Any, str]] = [
    (ProcessGroup, "barrier"),
    (ProcessGroup, "broadcast"),
    (ProcessGroup, "all_gather_single"),
    (AgreementClient, "agree_to_grow"),
    (CandidateRegistry, "invite"),
    (admission, "_connect"),
    (admission, "_connect_store"),
    (SessionMembers, "move_to"),
    (session, "send_state"),
    (session, "receive_state"),
]
RANKS = 4


class Faults:
    """What happens to one process at the points that it passes.

    Args:
        death: the number of the point at which it is killed; -1: it lives.
        delays: seconds, by the numbers of points.
    """

    def __init__(self, death: int, delays: dict[int, float]) -> None:
        self._death, self._delays = death, delays
        self._passed = 0
        self._grows = False
        for owner, name in POINTS:
            setattr(owner, name, self._around(getattr(owner, name)))
        for growing in ((Session, "_grow"), (JoiningProcess, "join")):
            setattr(*growing, self._during(getattr(*growing)))

    def _around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def passing(*args: Any, **how: Any) -> Any:
            self._pass()
            result = method(*args, **how)
            self._pass()
            return result

        return passing

    def _during(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def growing(*args: Any, **how: Any) -> Any:
            self._grows = True
            try:
                self._pass()
                return method(*args, **how)
            finally:
                self._pass()
                self._grows = False

        return growing

    def _pass(self) -> None:
        if not self._grows:
            return
        if self._passed == self._death:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self._delays.get(self._passed, 0.0))
        self._passed += 1


def plan(seed: int) -> tuple[dict[int, int], dict[int, dict[int, float]]]:
    """Who dies at which point, and who is how late at which points; RANKS: the newcomer."""
    choose = random.Random(seed)
    victims = choose.sample(range(RANKS + 1), choose.choice((1, 1, 2)))
    # The newcomer is invited first: the others wait for it to come.
    deaths = {victim: max(choose.randrange(16), int(victim == RANKS)) for victim in victims}
    late = {
        rank: {choose.randrange(16): choose.uniform(0.0, 0.6) for _ in range(choose.choice((0, 1, 2)))}
        for rank in range(RANKS + 1)
    }
    return deaths, late


def growing(group: ProcessGroup | None, deaths: dict[int, int], late: dict[int, dict[int, float]]) -> Log:
    """Train through a growth with faults."""
    me = RANKS if group is None else group.rank
    Faults(deaths.get(me, -1), late.get(me, {}))
    return training(group, 1)


def check(deaths: dict[int, int], late: dict[int, dict[int, float]]) -> None:
    """Four ranks and a newcomer train; those that live do as without a fault."""
    with no_leaks(), processes(growing, RANKS, deaths, late, timeout=PATIENCE) as ranks:
        ranks.store.wait(["asks"], PATIENCE)
        ranks.newcomer(growing, None, deaths, late)
        outcomes = ranks.join()
    killed = [rank for rank, each in enumerate(outcomes) if "was ended by SIGKILL" in each.describe()]
    assert set(killed) <= set(deaths)
    newcomer = outcomes[RANKS]
    alive = [each for rank, each in enumerate(outcomes[:RANKS]) if rank not in killed]
    if newcomer.ok:
        alive.append(newcomer)
    elif RANKS not in killed:  # the session ended before it was invited again
        assert "SystemExit: 0" in newcomer.describe()
    assert_as_undisturbed(logs_of(alive))


@pytest.mark.parametrize(
    ("death", "late"),
    [
        # Rank 3 dies on its way to the meeting, which the others have begun, and rank 1 has not.
        (5, {3: 0.6}),
        # Rank 3 dies when some wait for rank 1, which is late for the agreement.
        (8, {6: 0.6}),
        # Rank 3 dies before rank 1 comes to the growth.
        (1, {0: 0.6}),
    ],
)
def test_a_rank_dies_while_another_is_late_for_the_growth(death: int, late: dict[int, float]) -> None:
    check({3: death}, {1: late})


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(200))
def test_deaths_and_delays_at_any_point_of_a_growth(seed: int) -> None:
    check(*plan(seed))
