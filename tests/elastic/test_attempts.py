"""Blocks between two steps: a rank that dies in one costs one run of it."""

from __future__ import annotations

import random
import signal
import threading
from typing import Any

import pytest
import torch

from shoal import ProcessGroup, StateDiverged, UsageError
from shoal.elastic import Session, State, Step
from shoal.testing import faults, no_leaks, processes, run_threads

from .test_deaths import PATIENCE, die, survivors
from .test_newcomers import await_newcomers, logs_of
from .training import LENGTH, STEPS, Log, Training, assert_as_undisturbed, train

EVERY = 3  # steps between two evaluations


class Failure(Exception):
    """The program's own exception."""


class Evaluation:
    """The mean loss over all samples, each rank taking its share of them; with something at some points."""

    def __init__(self, at: dict[str, Any] | None = None) -> None:
        self._at = at or {}
        self.found: list[tuple[int, float]] = []
        self.runs = 0

    def __call__(self, step: Step) -> None:
        session = step._session
        assert isinstance(session, Session)
        if step.number % EVERY:
            return
        (model,) = session.state.all_models()
        data = Training()
        for attempt in session.attempts():
            with attempt:
                self.runs += 1
                session.state.best += 100.0  # put back if the block comes again
                self._pass("before", step)
                rank, size = session.group.rank, session.group.size
                x, y = data.x[rank::size], data.y[rank::size]
                with torch.no_grad():
                    total = ((model(x) - y) ** 2).sum()
                self._pass("reduced", step)
                session.group.all_reduce(total).wait()
                self._pass("exchange", step)
            self._pass("after", step)
        session.state.best -= 100.0
        self.found.append((step.number, round(float(total) / LENGTH, 9)))

    def _pass(self, point: str, step: Step) -> None:
        if (point, step.number) in self._at:
            self._at[point, step.number]()


def evaluating(group: ProcessGroup, at: dict[tuple[str, int], int]) -> tuple[Log, list[tuple[int, float]]]:
    """Train and evaluate; at some points ranks die."""
    mine = {}
    for (point, number), rank in at.items():
        if rank == group.rank and point in ("reduced", "exchange"):
            mine[point, number] = lambda: faults.die_at(group, "finished")
        elif rank == group.rank:
            mine[point, number] = die
    evaluation = Evaluation(mine)  # type: ignore[arg-type]
    log = train(group, lambda point, step: evaluation(step) if point == "between" else None)
    return log, evaluation.found


def expected() -> list[tuple[int, float]]:
    """The results of a run without deaths."""
    (result,) = run_threads(evaluating, 1, {})
    assert [number for number, _ in result[1]] == list(range(0, STEPS, EVERY))
    return list(result[1])


def assert_found(found: list[tuple[int, float]], since: int = 0) -> None:
    whole = {number: value for number, value in expected() if number >= since}
    assert dict(found) == pytest.approx(whole, abs=1e-8)
    assert len(found) <= len(whole) + 1  # a block before a step that comes again comes again too


def test_a_block_runs_once_where_nobody_dies() -> None:
    for log, found in run_threads(evaluating, 3, {}):
        assert_as_undisturbed([log])
        assert_found(found)
        assert len(found) == len(expected())
        assert log.events == []


def test_others_run_the_block_again_without_a_rank_whose_program_fails() -> None:
    def rank(group: ProcessGroup) -> tuple[Log, Evaluation] | None:
        def fail() -> None:
            raise Failure

        evaluation = Evaluation({("before", 6): fail} if group.rank == 1 else None)  # type: ignore[dict-item]
        try:
            log = train(group, lambda point, step: evaluation(step) if point == "between" else None)
        except Failure:
            return None
        return log, evaluation

    first, failed, last = run_threads(rank, 3)
    assert failed is None
    assert first is not None
    assert last is not None
    assert_as_undisturbed([first[0], last[0]])
    for log, evaluation in (first, last):
        assert_found(evaluation.found)
        assert evaluation.runs == len(evaluation.found) + 1
        (event,) = log.events
        assert (event.step, event.again, event.lost, event.size) == (6, False, (1,), 2)


@pytest.mark.parametrize(
    ("point", "victim"), [("before", 0), ("reduced", 2), ("exchange", 0), ("exchange", 2), ("after", 2)]
)
def test_a_death_at_each_point_of_a_block_costs_one_run(point: str, victim: int) -> None:
    with no_leaks(), processes(evaluating, 4, {(point, 6): victim}, timeout=PATIENCE) as ranks:
        results = survivors(ranks.join(), 1)
    assert_as_undisturbed([log for log, _ in results])  # type: ignore[misc]
    for log, found in results:  # type: ignore[misc]
        assert_found(found)
        assert [event.size for event in log.events] == [3]


def at_any_moment(group: ProcessGroup, seed: int) -> tuple[Log, list[tuple[int, float]]]:
    """Train and evaluate; a rank dies in or beside a block."""
    choose = random.Random(seed)
    victim, number = choose.randrange(group.size), choose.randrange(0, STEPS - EVERY, EVERY)
    timer = threading.Timer(choose.uniform(0.0, 0.004), die)
    starts = {("before", number): timer.start} if victim == group.rank else None
    evaluation = Evaluation(starts)  # type: ignore[arg-type]

    def visit(point: str, step: Step) -> None:
        if point == "between":
            evaluation(step)
        if point == "after the last" and victim == group.rank:
            timer.join()

    return train(group, visit), evaluation.found


def check_at_any_moment(seed: int) -> None:
    with no_leaks(), processes(at_any_moment, 4, seed, timeout=PATIENCE) as ranks:
        results = survivors(ranks.join(), 1)
    assert_as_undisturbed([log for log, _ in results])  # type: ignore[misc]
    for _, found in results:  # type: ignore[misc]
        assert_found(found)


@pytest.mark.parametrize("seed", range(2))
def test_a_death_at_any_moment_beside_a_block(seed: int) -> None:
    check_at_any_moment(seed)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_deaths_at_any_moment_beside_a_block(seed: int) -> None:
    check_at_any_moment(seed)


def with_a_newcomer(group: ProcessGroup | None, death: int) -> tuple[Log, list[tuple[int, float]]]:
    """One joins after two blocks have counted; rank 1 dies in a later one."""
    victim = group is not None and group.rank == 1
    evaluation = Evaluation({("before", death): die} if victim else None)  # type: ignore[dict-item]

    def visit(point: str, step: Step) -> None:
        if point != "between":
            return
        if group is not None and step.number == 4 and step._session.group.rank == 0:
            group.store.set("asks", b"")
            await_newcomers(step, 1)
        evaluation(step)

    return train(group, visit), evaluation.found


def test_who_joins_counts_the_blocks_that_the_others_have_run() -> None:
    with no_leaks(), processes(with_a_newcomer, 3, 9, timeout=PATIENCE) as ranks:
        ranks.store.wait(["asks"], PATIENCE)
        ranks.newcomer(with_a_newcomer, None, 9)
        outcomes = ranks.join()
    assert outcomes[1].exitcode == -signal.SIGKILL
    results: list[Any] = logs_of([outcomes[0], outcomes[2], outcomes[3]])
    assert_as_undisturbed([log for log, _ in results])
    for log, found in results:
        assert_found(found, since=STEPS - len(log.steps))


def test_a_block_of_a_process_that_has_not_joined_runs_alone() -> None:
    state = State(best=0.0)
    with Session(state) as session:
        session._members._joining = object()  # type: ignore[assignment]
        runs = 0
        for attempt in session.attempts():
            with attempt:
                runs += 1
                assert session.group.size == 1
        session._members._joining = None
    assert runs == 1


def test_what_is_refused() -> None:
    def rank(group: ProcessGroup) -> None:
        training = Training()
        with Session(training.state, group=group) as session:
            for step in session.steps(1):
                with step:
                    with pytest.raises(UsageError, match="between two steps, not in one"):
                        next(session.attempts()).__enter__()
                    step.commit()
            for attempt in session.attempts():
                with attempt:
                    with pytest.raises(UsageError, match="in the block of an attempt"):
                        next(session.attempts()).__enter__()
                    with pytest.raises(UsageError, match=r"AdamW stepped in a block of attempts\(\)"):
                        training.optimizer.step()
            with pytest.raises(UsageError, match="an attempt is used once"):
                attempt.__enter__()
            unused = session.attempts()
            next(unused)
            with pytest.raises(UsageError, match="was not used"):
                next(unused)

    run_threads(rank, 1)


def test_ranks_that_run_other_blocks_hear_of_it() -> None:
    def rank(group: ProcessGroup) -> str:
        with Session(State(best=0.0), group=group) as session:
            session.settle()
            with pytest.raises(StateDiverged) as caught:
                (commit if group.rank == 1 else run_a_block)(session)
        return str(caught.value)

    def commit(session: Session) -> None:
        for step in session.steps(1):
            with step:
                step.commit()

    def run_a_block(session: Session) -> None:
        for attempt in session.attempts():
            with attempt:
                pass

    first, second = run_threads(rank, 2)
    assert (
        "end of a block of attempts() after 0 steps on rank 0 of 2: rank 1 commits step 0 in epoch 0" in first
    )
    assert "commit of step 0 on rank 1 of 2: rank 1 commits step 0 in epoch 0" in second
