"""Sessions: steps, commits, and what is refused.  Ranks are threads."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal import OperationTimeout, ProcessGroup, StateDiverged, UsageError
from shoal.elastic import Session, State, Step
from shoal.testing import run_threads

from .training import LENGTH, Log, Training, assert_as_undisturbed, train

POINTS = ["before backward", "in backward", "before commit", "after commit", "after update", "between"]


class Failure(Exception):
    """What a program raises."""


def failing(group: ProcessGroup, point: str, victim: int, number: int) -> Log | None:
    """Train; the program of ``victim`` fails at ``point`` of a step."""
    me = group.rank

    def visit(here: str, step: Step) -> None:
        if me == victim and (here, step.number) == (point, number):
            raise Failure

    try:
        return train(group, visit)
    except Failure:
        assert me == victim
        return None


@pytest.mark.parametrize("size", [1, 2, 5])
def test_training_without_a_fault_is_that_of_one_process(size: int) -> None:
    logs = run_threads(train, size)
    assert_as_undisturbed(logs)
    assert not any(log.events for log in logs)


@pytest.mark.parametrize("point", POINTS)
def test_others_go_on_without_a_rank_whose_program_fails(point: str) -> None:
    logs = run_threads(failing, 3, point, 1, 5)
    survivors = [log for log in logs if log is not None]
    assert len(survivors) == 2
    assert_as_undisturbed(survivors)
    for log in survivors:
        (event,) = log.events
        assert (event.lost, event.size, event.previous_size, event.epoch) == ((1,), 2, 3, 1)


def test_the_batch_may_shrink_with_the_group_and_callbacks_hear_of_it() -> None:
    def rank(group: ProcessGroup) -> Any:
        me, training = group.rank, Training(per_rank=4)
        seen: list[Any] = []
        try:
            with Session(training.state, group=group) as session:
                model = session.parallel(training.net)
                session.on_resize(lambda event: seen.append((event.step, event.size, training.state.steps)))
                for step in session.steps(until=6):
                    with step:
                        if me == 2 and step.number == 3:
                            raise Failure
                        seen.append(len(step.indices))
                        (training.loss(model, step.indices) * step.weight).backward()
                        step.commit()
                        training.update()
        except Failure:
            return None
        return seen, training.samples.offset, session.events[0].again

    results = run_threads(rank, 3)
    assert results[2] is None
    lost = (3, 2, 3)
    assert results[0] == results[1] == ([4, 4, 4, 4, lost, 4, 4, 4], (3 * 12 + 3 * 8) % LENGTH, True)


def test_a_session_of_its_own_meets_the_others_and_closes_the_group() -> None:
    training = Training()
    with Session(training.state) as session:
        group = session.group
        for step in session.steps(2):
            with step:
                step.commit()
    assert group.state == "closed"
    assert (training.state.steps, training.samples.offset) == (2, 24)
    with Session(training.state) as session:
        assert [step.number for step in session.steps(2)] == []


def test_no_rank_leaves_while_another_one_may_need_its_note() -> None:
    def rank(group: ProcessGroup) -> None:
        with Session(State(best=0.0), group=group, min_size=2) as session:
            for step in session.steps(1):
                with step:
                    step.commit()
            if group.rank == 1:
                group.store.set("ends", b"")
        assert group.store.check(["ends"])

    run_threads(rank, 2)


def every_step(state: State, fn: Callable[[Step, Session], Any], group: ProcessGroup | None = None) -> None:
    """A session of three steps; ``fn`` is their block."""
    with Session(state, group=group) as session:
        for step in session.steps(3):
            with step:
                fn(step, session)


def test_ranks_that_hold_different_states_all_hear_of_it_before_they_change() -> None:
    def rank(group: ProcessGroup) -> str:
        training = Training()
        if group.rank == 1:
            training.optimizer.param_groups[0]["lr"] = 1.0
        before = training.state.digest()
        with pytest.raises(StateDiverged, match=r"commit of step 0 on rank \d of 3: rank 1 has") as caught:
            every_step(training.state, lambda step, session: step.commit(), group)
        assert training.state.digest() == before
        assert training.state.steps == 0
        return str(caught.value)

    for said in run_threads(rank, 3):
        assert "rank 1 has different parameters, optimisers or samples than rank 0" in said
        assert "rank 2" not in said.partition(":")[2]


def test_a_rank_that_moves_in_its_samples_is_found() -> None:
    def rank(group: ProcessGroup) -> None:
        training = Training()

        def commit(step: Step, session: Session) -> None:
            training.samples.offset += group.rank == 1 and step.number == 1
            step.commit()

        with pytest.raises(
            StateDiverged, match=r"commit of step 1 .*: rank 1 has different samples than rank 0"
        ):
            every_step(training.state, commit, group)

    run_threads(rank, 2)


def test_ranks_that_commit_different_steps_all_hear_of_it() -> None:
    def rank(group: ProcessGroup) -> None:
        training = Training()
        if group.rank == 1:
            training.state.step_counts(0)
        with pytest.raises(StateDiverged, match="rank 1 commits step 1 in epoch 0"):
            every_step(training.state, lambda step, session: step.commit(), group)

    run_threads(rank, 2)


def test_a_step_that_is_used_wrongly_is_an_error() -> None:
    training = Training()

    def early(step: Step, session: Session) -> None:
        training.loss(session.parallel(training.net), step.indices).backward()
        training.optimizer.step()

    def twice(step: Step, session: Session) -> None:
        step.commit()
        step.commit()

    for fn, said in (
        (lambda step, session: None, r"step 0 on rank 0 ended without step\.commit\(\)"),
        (early, r"AdamW stepped before step\.commit\(\)"),
        (twice, r"step 0 on rank 0: commit\(\) is called once"),
        (lambda step, session: step.__enter__(), "step 0 has been used"),
    ):
        training = Training()
        before = training.state.digest()
        with pytest.raises(UsageError, match=said):
            every_step(training.state, fn)
        assert training.state.digest() == before
    training.optimizer.step()  # the session is over
    with Session(State(best=1.0)) as session:
        steps = session.steps()
        next(steps)
        with pytest.raises(UsageError, match="step 0 was not used"):
            next(steps)
    with Session(State(best=1.0)) as session:
        step = next(session.steps())
        assert step.number == 0
        with pytest.raises(UsageError, match="has no samples"):
            step.indices  # noqa: B018


def test_what_a_session_cannot_use_is_refused() -> None:
    training = Training()
    for arguments, said in (
        (({},), "takes a shoal.elastic.State, got dict"),
        ((training.state, 0), "min_size=0: expected a positive integer"),
        ((training.state, 1, "world"), "group must be a shoal.ProcessGroup, got str"),
    ):
        with pytest.raises(UsageError, match=said):
            Session(arguments[0], **dict(zip(("min_size", "group"), arguments[1:], strict=False)))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has its group within its block"):
        Session(training.state).group  # noqa: B018
    with (
        pytest.raises(UsageError, match="min_size=2, and the group's size is 1"),
        Session(training.state, min_size=2),
    ):
        pass
    other = nn.Linear(2, 2)
    with Session(training.state) as session:
        with pytest.raises(UsageError, match="the module is not part of the State"):
            session.parallel(other)
        with pytest.raises(UsageError, match="leave group= out"):
            session.parallel(training.net, group=session.group)
        session.parallel(training.net[0])  # a module inside one is a part


def test_a_hook_with_a_state_is_refused_before_the_first_step() -> None:
    training = Training()
    with Session(training.state) as session:
        model = session.parallel(training.net)
        model.register_comm_hook({}, lambda state, bucket: session.group.all_reduce(bucket.buffer()))
        step = next(session.steps())
        with pytest.raises(UsageError, match="the state of its communication hook, a dict"):
            step.__enter__()


def test_an_error_of_the_program_in_the_group_is_no_loss() -> None:
    """All ranks live: to begin the step again would meet the same error for ever."""

    def rank(group: ProcessGroup) -> None:

        def late(step: Step, session: Session) -> None:
            if group.rank == 0:
                group.all_gather_single(torch.empty(2, 4), torch.empty(4), timeout=0.05).wait()
            while group.state == "open":
                time.sleep(0.001)
            step.commit()

        with pytest.raises(OperationTimeout):
            every_step(Training().state, late, group)

    run_threads(rank, 2)


def test_random_numbers_of_a_step_are_those_of_its_number_and_rank() -> None:
    def drawn(until: int, skip: int) -> list[list[float]]:
        training, found = Training(), []
        for _ in range(skip):
            training.state.step_counts(12)
        with Session(training.state) as session:
            for step in session.steps(until):
                with step:
                    found.append([torch.rand(()).item(), random.random()])
                    step.commit()
        return found

    everything = drawn(4, 0)
    assert drawn(4, 2) == everything[2:]
    assert len({number for pair in everything for number in pair}) == 8
