"""A ZeroRedundancyOptimizer in a session: ranks die before, in and after its exchange, and at any moment.

Beside it each rank trains copies of the parameters with the optimiser inside alone, on the same gradients:
after every step all parameters, and the state that the rank owns, must be equal to that in every bit.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import ProcessGroup, StateDiverged, StateLost, UsageError, ZeroRedundancyOptimizer
from shoal.elastic import Session, State, Step
from shoal.testing import faults, no_leaks, processes, run_threads

from .test_deaths import PATIENCE, Death, die, survivors
from .test_newcomers import await_newcomers
from .training import STEPS, Log, Training, assert_as_undisturbed, train

LONGER = 30
WIDTH = 72  # the largest parameter is sent by itself


class ShardedOptimizer(Training):
    """The same with two owners of each parameter, and the optimiser inside alone beside it."""

    optimizer: ZeroRedundancyOptimizer

    def __init__(self, *, group: ProcessGroup | None = None, as_views: bool = False, **options: Any) -> None:
        self.group, self.as_views = group, as_views
        super().__init__(width=WIDTH, **options)
        self.copies = [parameter.detach().clone() for parameter in self.net.parameters()]
        self.beside = torch.optim.AdamW(self.copies, lr=0.02)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.beside, 0.97)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(
            self.net.parameters(), torch.optim.AdamW, group=self.group, lr=0.02, copies=2,
            parameters_as_bucket_view=self.as_views,
        )  # fmt: skip

    def update(self) -> None:
        for mine, parameter in zip(self.copies, self.net.parameters(), strict=True):
            assert parameter.grad is not None
            mine.grad = parameter.grad.clone()
        self.beside.step()
        self.schedule.step()
        super().update()
        self.compare()

    def compare(self) -> None:
        """Parameters, and the state of those that this rank owns, are those of the optimiser alone."""
        for mine, parameter in zip(self.copies, self.net.parameters(), strict=True):
            assert torch.equal(mine, parameter)
            state = self.optimizer.state.get(parameter, {})
            assert all(torch.equal(self.beside.state[mine][key], value) for key, value in state.items())

    def checkpoint(self) -> bool:
        """Bring the state to rank 0; whether this is it, and it has the state of the optimiser alone."""
        self.optimizer.consolidate_state_dict()
        if self.optimizer.group.rank:
            return False
        saved, expected = self.optimizer.state_dict(), self.beside.state_dict()
        assert saved["state"].keys() == expected["state"].keys()
        for number, state in expected["state"].items():
            assert all(torch.equal(saved["state"][number][key], value) for key, value in state.items())
        return True

    def owned(self) -> list[int]:
        """The numbers of the parameters whose state is here."""
        return [number for number, p in enumerate(self.net.parameters()) if p in self.optimizer.state]


def wide() -> Training:
    return Training(width=WIDTH)


@dataclass
class Sight:
    """What one rank has seen."""

    log: Log
    owned: list[int]
    saved: list[int]


def dying(group: ProcessGroup, deaths: list[Death], as_views: bool) -> Sight:
    """Train, and gather the state after each second step; ranks die one after another."""
    saved: list[int] = []
    mine = [(number, point) for number, point, rank in deaths if rank == group.rank]

    def visit(here: str, step: Step) -> None:
        if (step.number, here) in mine:
            die()
        if here == "before commit" and (step.number, "inside commit") in mine:
            faults.die_at(group, "finished")
        if here == "after commit" and (step.number, "in exchange") in mine:
            faults.die_at(group, "finished")
        if here == "after update" and step.number % 2:
            if (step.number, "in checkpoint") in mine:
                faults.die_at(group, "finished")
            if training.checkpoint():
                saved.append(step.number)

    training = ShardedOptimizer(as_views=as_views)
    log = train(group, visit, training=training)
    return Sight(log, training.owned(), saved)


@pytest.mark.parametrize(
    ("deaths", "as_views"),
    [
        ([(2, "after commit", 0), (5, "in checkpoint", 2)], True),
        ([(3, "in exchange", 3), (4, "before backward", 0), (9, "in exchange", 1)], False),
        ([(0, "inside commit", 1), (1, "in exchange", 0), (STEPS - 1, "in exchange", 3)], True),
        ([(0, "in exchange", 2), (5, "in checkpoint", 0), (STEPS - 1, "after update", 1)], False),
    ],
)
def test_the_state_outlives_a_death_at_each_point(deaths: list[Death], as_views: bool) -> None:
    with no_leaks(), processes(dying, 4, deaths, as_views, timeout=PATIENCE) as ranks:
        outcomes = survivors(ranks.join(), len(deaths))
    assert_as_undisturbed([each.log for each in outcomes], make=wide)
    owners = [sum(number in each.owned for each in outcomes) for number in range(6)]
    assert owners == [min(len(outcomes), 2)] * 6
    saved = {number for each in outcomes for number in each.saved}
    died = max((number for number, _, rank in deaths if rank == 0), default=-1)  # with what it had saved
    assert saved >= set(range(1, STEPS, 2)) - set(range(died + 1))


@pytest.mark.parametrize("topology", [{"transport": "tcp"}, {"hosts": "abab"}])
def test_the_state_outlives_a_death_across_hosts(topology: dict[str, Any]) -> None:
    deaths = [(3, "in exchange", 1), (4, "in exchange", 0)]
    with no_leaks(), processes(dying, 4, deaths, False, timeout=PATIENCE, **topology) as ranks:
        outcomes = survivors(ranks.join(), 2)
    assert_as_undisturbed([each.log for each in outcomes], make=wide)


def dying_at_any_moment(group: ProcessGroup, seed: int) -> Log:
    """Train; two ranks die at any moment, one after the other's state was brought in order."""
    choose, me = random.Random(seed), group.rank
    victims = choose.sample(range(group.size), 2)
    first = choose.randrange(10)
    numbers = [first, first + 2 + choose.randrange(LONGER - first - 5)]
    points = [choose.choice(["between", "before commit", "after commit", "after update"]) for _ in victims]
    delays = [choose.uniform(0.0, 0.003) for _ in victims]
    started: list[threading.Timer] = []

    def visit(here: str, step: Step) -> None:
        if me in victims:
            which = victims.index(me)
            if not started and (step.number, here) == (numbers[which], points[which]):
                started.append(threading.Timer(delays[which], die))
                started[0].start()
            # It is dead before the second one is to die: both at once could own the same parameter.
            if started and (here == "after the last" or step.number > numbers[which]):
                started[0].join()
        if here == "after update" and step.number % 3 == 0:
            training.checkpoint()

    training = ShardedOptimizer(as_views=bool(seed % 2))
    return train(group, visit, until=LONGER, training=training)


@pytest.mark.parametrize("seed", range(3))
def test_two_deaths_at_any_moment(seed: int) -> None:
    with no_leaks(), processes(dying_at_any_moment, 4, seed, timeout=PATIENCE) as ranks:
        logs = survivors(ranks.join(), 2)
    assert_as_undisturbed(logs, until=LONGER, make=wide)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(3, 15))
def test_many_deaths_at_any_moment(seed: int) -> None:
    test_two_deaths_at_any_moment(seed)


class Alone(ShardedOptimizer):
    """The same without the optimiser beside it, whose state a newcomer does not get."""

    def update(self) -> None:
        Training.update(self)


def growing(group: ProcessGroup | None) -> Sight:
    """Train; a process joins, and two of the others die later."""
    me = -1 if group is None else group.rank

    def visit(here: str, step: Step) -> None:
        if group is not None and (step.number, here) == (3, "between") and me == 0:
            group.store.set("asks", b"")
            await_newcomers(step, 1)
        if (me, step.number, here) in ((2, 7, "before backward"), (1, 10, "after commit")):
            faults.die_at(step._session.group, "finished")

    training = Alone()
    return Sight(train(group, visit, training=training), training.owned(), [])


def test_a_newcomer_takes_its_share_of_the_state() -> None:
    with no_leaks(), processes(growing, 3, timeout=PATIENCE, env={"SHOAL_VOTE_TIMEOUT": "60"}) as ranks:
        ranks.store.wait(["asks"], PATIENCE)
        ranks.newcomer(growing, None)
        outcomes = survivors(ranks.join(), 2)
    assert_as_undisturbed([each.log for each in outcomes], make=wide)
    assert [each.owned for each in outcomes] == [[*range(6)]] * 2
    assert [len(each.log.steps) for each in outcomes] == [STEPS, STEPS - 4]


def losing_all_owners(group: ProcessGroup, point: str) -> str:
    """Train; both owners of a parameter are killed at once."""
    training, me = ShardedOptimizer(), group.rank

    def visit(here: str, step: Step) -> None:
        if (step.number, here) == (4, point):
            group.store.set(f"owned/{me}", repr(training.owned()).encode())
            owners = [rank for rank in range(group.size) if b"2" in group.store.get(f"owned/{rank}")]
            assert len(owners) == 2
            if me in owners:
                die()

    with pytest.raises(StateLost) as caught:
        train(group, visit, training=training)
    return str(caught.value)


@pytest.mark.parametrize(("point", "steps"), [("before backward", 4), ("before commit", 5)])
def test_the_death_of_all_owners_is_told_with_the_names_of_what_is_lost(point: str, steps: int) -> None:
    with no_leaks(), processes(losing_all_owners, 4, point, timeout=PATIENCE) as ranks:
        told = survivors(ranks.join(), 2)
    for said in map(str, told):
        assert said.startswith("the optimiser's state of parameter 2 of group 0")
        assert f"lost with all its owners, after {steps} steps.  Load a checkpoint, in a new session" in said


def session_of(training: ShardedOptimizer, group: ProcessGroup | None, until: int) -> None:
    """Train with plain steps, without any fault."""
    with Session(training.state, group=group) as session:
        model = session.parallel(training.net)
        for step in session.steps(until):
            with step:
                (training.loss(model, step.indices) * step.weight).backward()
                step.commit()
                Training.update(training)


def test_a_checkpoint_is_loaded_by_another_number_of_ranks(tmp_path: Path) -> None:
    def first(group: ProcessGroup) -> None:
        training = ShardedOptimizer()
        session_of(training, group, 5)
        training.optimizer.consolidate_state_dict(to=1)
        if group.rank == 1:
            training.state.save(tmp_path / "state.pt")

    def second(group: ProcessGroup) -> tuple[list[torch.Tensor], list[int]]:
        training = ShardedOptimizer()
        torch._foreach_zero_([parameter.data for parameter in training.net.parameters()])
        training.state.load(tmp_path / "state.pt")
        assert len(training.optimizer.state) == 6  # until the ranks share it out
        session_of(training, group, 9)
        assert training.state.steps == 9
        return [parameter.detach() for parameter in training.net.parameters()], training.owned()

    run_threads(first, 2)
    (one, *others), owned = zip(*run_threads(second, 3), strict=True)
    assert all(map(torch.equal, one + one, others[0] + others[1]))
    assert sorted(number for numbers in owned for number in numbers) == sorted([*range(6)] * 2)
    solo_group = wide()
    batches = []
    for _ in range(9):
        batches.append(solo_group.samples.share(0, 1).indices)
        solo_group.samples.advance(12)
    for mine, expected in zip(one, solo_group.solo_group(batches), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)


def test_one_session_follows_another() -> None:
    training = ShardedOptimizer()
    session_of(training, None, 2)
    assert training.optimizer.group.state == "closed"
    session_of(training, None, 4)
    assert training.optimizer.common_options()["steps"] == 4


def test_ranks_with_other_states_or_options_hear_of_it() -> None:
    def rank(group: ProcessGroup, what: str) -> str:
        training = ShardedOptimizer()
        session_of(training, group, 1)
        if group.rank == 1 and what == "options":
            training.optimizer.param_groups[0]["lr"] = 1.0
        if group.rank == 1 and what == "state":
            training.optimizer.state[training.net[2].weight]["exp_avg"][0, 0] += 1.0
        with pytest.raises(StateDiverged) as caught:
            session_of(training, group, 2)
        return str(caught.value)

    for said in run_threads(rank, 2, "state"):
        assert said.startswith("ranks 0 and 1 own parameter 2 of group 0, and have different states of it")
    for said in run_threads(rank, 2, "options"):
        assert "rank 1 has different parameters, optimisers or samples than rank 0" in said


def test_what_a_session_cannot_do_with_it_is_refused() -> None:
    def optimizer(**options: Any) -> ZeroRedundancyOptimizer:
        net = torch.nn.Linear(2, 2)
        return ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, copies=2, **options)

    with pytest.raises(UsageError, match="has several ZeroRedundancyOptimizers, and a session takes one"):
        Session(State(one=optimizer(), other=optimizer()))
    training = ShardedOptimizer()

    def rank(group: ProcessGroup) -> None:
        state = State(optimizer=optimizer(group=group))
        with (
            group.split(0) as other,
            pytest.raises(UsageError, match="has another group than the session; make it without group="),
            Session(state, group=other),
        ):
            pass
        with Session(state, group=group):
            pass

    run_threads(rank, 2)
    with Session(training.state) as session:
        model = session.parallel(training.net)
        step = next(session.steps())
        with step:
            training.loss(model, step.indices).backward()
            step.commit()
            training.optimizer.step()
            with pytest.raises(UsageError, match="stepped twice after the commit of step 0"):
                training.optimizer.step()
