"""A loss that one rank detects in a step, and another before that, interrupts the step on both.

A *late* rank has taken part in the last collective before the step.  It detects the loss before that
collective has completed for it, while the other ranks are in the step already.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from shoal import ProcessGroup
from shoal.elastic import Session, Step
from shoal.parallel.zero.ownership import Ownership
from shoal.testing import no_leaks, processes, run_threads

from .test_deaths import die
from .test_newcomers import await_newcomers, logs_of
from .test_sharded import ShardedOptimizer
from .training import LENGTH, STEPS, Log, Training, assert_as_undisturbed, train

EVERY = 3  # steps between two evaluations
PATIENCE = 60.0


class Failure(Exception):
    """The program's own exception."""


def session_of(step: Step) -> Session:
    session = step._session
    assert isinstance(session, Session)
    return session


def raise_its_failure(group: ProcessGroup) -> None:
    """Wait until a rank of the group is lost, and raise that."""
    until = time.monotonic() + PATIENCE
    while group.state == "open" and time.monotonic() < until:
        time.sleep(0.001)
    group.barrier()


#: Whether the program evaluates at a point between two steps.
When = Callable[[str, Step], bool]
WHEN: dict[str, When] = {
    "before a step": lambda point, step: point == "between" and step.number % EVERY == 0,
    "after some steps": lambda point, step: (
        point == "after the block" and session_of(step).state.steps % EVERY == 0
    ),
    "after a step": lambda point, step: point == "after the block" and step.number % EVERY == 0,
    "after a completed step": lambda point, step: (
        point == "after the block" and step.committed and step.number % EVERY == 0
    ),
}


class Loss(NamedTuple):
    """The rank ``victim`` fails in the step ``number``, while the rank ``late`` is late in ``collective``.

    Both are ranks of the first group.
    """

    collective: str
    number: int
    late: int
    victim: int


#: The function that contains the last collective, and the number of completed steps less that of the step.
COLLECTIVES: dict[str, tuple[type, str, int]] = {
    "the end of a block": (Session, "exchange_attempt_end", 0),
    "a commit": (Session, "exchange", -1),
    "sharing the state": (Session, "_share_state", 0),
    "sending parameters": (Ownership, "exchange", 0),
}


class Program:
    """The training of one rank, with evaluations.

    Attributes:
        found: the number of completed steps and the mean loss, for each evaluation.
        begun: the number of each step that has begun.
    """

    def __init__(self, group: ProcessGroup, when: When, losses: tuple[Loss, ...], *, sharded: bool) -> None:
        self._group, self._when, self._losses = group, when, losses
        self._rank = group.rank
        self._training = ShardedOptimizer(group=group) if sharded else Training()
        self.found: list[tuple[int, float]] = []
        self.begun: list[int] = []

    def run(self) -> Log | None:
        """Train; None: this rank was a victim."""
        for epoch, loss in enumerate(self._losses):
            if loss.late == self._rank:
                self._be_late(loss, epoch)
        try:
            return train(self._group, self._visit, training=self._training)
        except Failure:
            return None

    def _be_late(self, loss: Loss, epoch: int) -> None:
        kind, name, completed = COLLECTIVES[loss.collective]
        original = getattr(kind, name)
        state = self._training.state

        def late(owner: Any, *args: Any) -> Any:
            group = owner.group
            value = original(owner, *args)
            mine = state is owner.state if isinstance(owner, Session) else owner is self._ownership()
            if mine and group.epoch == epoch and state.steps == loss.number + completed:
                raise_its_failure(group)
            return value

        setattr(kind, name, late)

    def _ownership(self) -> object:
        return getattr(self._training.optimizer, "_ownership", None)

    def _visit(self, point: str, step: Step) -> None:
        session = session_of(step)
        if point == "before backward":
            self.begun.append(step.number)
            for epoch, loss in enumerate(self._losses):
                if (loss.victim, loss.number, epoch) == (self._rank, step.number, session.group.epoch):
                    raise Failure
        if self._when(point, step):
            self.found.append(evaluate(session, self._training))


def evaluate(session: Session, training: Training) -> tuple[int, float]:
    for attempt in session.attempts():
        with attempt, torch.no_grad():
            rank, size = session.group.rank, session.group.size
            total = ((training.net(training.x[rank::size]) - training.y[rank::size]) ** 2).sum()
            session.group.all_reduce(total).wait()
    return session.state.steps, round(float(total) / LENGTH, 9)


def run(
    group: ProcessGroup, when: When, losses: tuple[Loss, ...], sharded: bool
) -> tuple[Log | None, list[tuple[int, float]], list[int]]:
    program = Program(group, when, losses, sharded=sharded)
    return program.run(), program.found, program.begun


AT_THE_BLOCK, AT_A_COMMIT = Loss("the end of a block", 6, 2, 1), Loss("a commit", 6, 2, 1)


@pytest.mark.parametrize(
    ("when", "losses"),
    [
        ("before a step", [AT_THE_BLOCK]),
        ("after some steps", [AT_THE_BLOCK]),
        ("after some steps", [Loss("sharing the state", 0, 2, 1)]),
        ("after a step", [AT_A_COMMIT]),
        ("after a step", [Loss("sending parameters", 6, 2, 1)]),
        ("after a completed step", [AT_A_COMMIT]),
        ("after a completed step", [Loss("the end of a block", 7, 2, 1), Loss("sharing the state", 7, 3, 4)]),
        ("after a completed step", [Loss("the end of a block", 7, 2, 1), Loss("sharing the state", 7, 2, 4)]),
    ],
)
def test_a_step_is_interrupted_on_all_ranks_or_on_none(
    when: str, losses: list[Loss], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, name, _ in COLLECTIVES.values():
        monkeypatch.setattr(kind, name, getattr(kind, name))  # restored at the end
    sharded = any(loss.collective == "sending parameters" for loss in losses)
    ((_, expected, _),) = run_threads(run, 1, WHEN[when], (), False)
    results = run_threads(run, 3 + 2 * (len(losses) - 1), WHEN[when], tuple(losses), sharded)
    for loss in losses:
        assert results[loss.victim][0] is None
    survivors = [each for each in results if each[0] is not None]
    assert len(survivors) == len(results) - len(losses)
    make = (lambda: Training(width=72)) if sharded else Training
    assert_as_undisturbed([log for log, _, _ in survivors if log is not None], make=make)
    for _, found, begun in survivors:
        assert begun == sorted([*range(STEPS), *(loss.number for loss in losses)])
        assert found == survivors[0][1]
        if not sharded:
            assert {step: value for step, value in found if step in dict(expected)} == pytest.approx(
                dict(expected), abs=1e-8
            )


def lose_the_state(session: Session) -> None:
    """Receive the state, and lose it again when a rank is lost."""
    share_state(session)
    if not session._interruptions:
        session._has_state = False
        raise_its_failure(session.group)


share_state = Session._share_state


def with_a_newcomer(
    group: ProcessGroup | None, victim: int
) -> tuple[Log, list[tuple[int, float]], list[int]]:
    """A process joins before step 5.  In that step the victim dies, before the process has the state."""
    training = Training()
    found, begun = [], []
    if group is None:
        Session._share_state = lose_the_state  # type: ignore[method-assign]

    def visit(point: str, step: Step) -> None:
        session = session_of(step)
        if group is not None and (point, step.number, group.rank) == ("between", 4, 0):
            group.store.set("asks", b"")
            await_newcomers(step, 1)
        if point == "before backward":
            begun.append(step.number)
            if group is not None and group.rank == victim and step.number == 5:
                die()
        if point == "after the block" and session.state.steps % 5 == 0:
            found.append(evaluate(session, training))

    return train(group, visit, training=training), found, begun


def test_a_process_that_joins_has_the_same_interruptions() -> None:
    with no_leaks(), processes(with_a_newcomer, 3, 1, timeout=PATIENCE) as ranks:
        ranks.store.wait(["asks"], PATIENCE)
        ranks.newcomer(with_a_newcomer, None, -1)
        outcomes = ranks.join()
    assert outcomes[1].exitcode == -signal.SIGKILL
    results: list[Any] = logs_of([outcomes[0], outcomes[2], outcomes[3]])
    assert_as_undisturbed([log for log, _, _ in results])
    for _, found, begun in results:
        assert begun[-10:] == [5, 5, *range(6, STEPS)]
        assert found[-2:] == results[0][1][-2:]
        assert [number for number, _ in found[-2:]] == [5, 10]  # also after the interrupted step
