"""The store dies, and is empty when it is back: training does not notice, and processes join again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shoal import ProcessGroup
from shoal.elastic import Samples, Session, State
from shoal.elastic.membership import admission
from shoal.errors import StoreError
from shoal.testing import chaos, no_leaks, processes

PATIENCE = 60.0


def growing(group: ProcessGroup | None, max_count: int, sizes: list[int]) -> tuple[list[int], int]:
    """Train until the group has had these sizes, one after the other; the sizes, and how many steps count."""
    state = State(model=nn.Linear(2, 1), optimizer=None, samples=Samples(12, batch=12), sizes=[], after=0)
    with Session(state, group=group, max_size=max_count) as session:
        if group is not None:
            chaos.ready(group)
        for step in session.steps():
            if state.after == 20:
                break
            with step:
                step.commit()
                if state.sizes[-1:] != [session.group.size]:
                    state.sizes = [*state.sizes, session.group.size]
                state.after += state.sizes == sizes
            chaos.mark(session.group)
            time.sleep(0.002)
    return state.sizes, state.after


@pytest.mark.parametrize("killed", [0, 1])
def test_newcomers_join_when_a_store_that_died_is_back(killed: int) -> None:
    """One waits while the store dies, and gets its place when a rank has died too; it does what rank 0 did
    until then, if that is the dead one."""
    harms = [
        chaos.Harm(3, "join", 0.0), chaos.Harm(chaos.NO_RANK, "store", 1.0), chaos.Harm(killed, "kill", 1.2)
    ]  # fmt: skip
    trial = chaos.play(growing, 3, 3, [3, 2, 3], harms=harms, ready=True, timeout=PATIENCE)
    assert trial.bad == ""
    assert trial.lost == (killed,)
    assert trial.joined == (3,)


def test_a_newcomer_that_comes_while_there_is_no_store_joins_when_it_is_back() -> None:
    harms = [chaos.Harm(chaos.NO_RANK, "store", 0.0), chaos.Harm(2, "join", 0.1)]
    trial = chaos.play(growing, 2, 3, [2, 3], harms=harms, ready=True, timeout=PATIENCE)
    assert trial.bad == ""
    assert trial.joined == (2,)
    (seconds,) = trial.joined_after
    assert seconds is not None
    assert seconds > 0


def growing_through(told: Path) -> tuple[list[int], int]:
    """Join; after the first invitation, wait until the store is gone before anything is done about it."""
    connect = admission._connect

    def late(meeting: Any, place: Any, *args: Any) -> Any:
        admission._connect = connect  # type: ignore[method-assign]
        told.touch()
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                place.store.clone(PATIENCE, accept_new_data=True).close()
            except StoreError:
                break
        return connect(meeting, place, *args)

    admission._connect = late  # type: ignore[assignment, method-assign]
    return growing(None, 3, [2, 3])


def test_a_newcomer_whose_store_dies_after_the_invitation_is_invited_again(tmp_path: Path) -> None:
    told = tmp_path / "invited"
    with no_leaks(), processes(growing, 2, 3, [2, 3], mortal_store=True, timeout=PATIENCE) as ranks:
        ranks.newcomer(growing_through, told)
        until = time.monotonic() + PATIENCE
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.002)
        ranks.kill_store()
        time.sleep(0.5)  # what is tested is that it stays away for a moment
        ranks.restore_store()
        outcomes = ranks.join()
    assert all(each.ok for each in outcomes), "\n".join(each.describe() for each in outcomes)
    assert [each.value for each in outcomes] == [([2, 3], 20)] * 3
