"""Before the first step: ranks begin with what rank 0 holds, and a rank that dies meanwhile costs nothing."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn

from shoal import ModelMismatch, ProcessGroup
from shoal.elastic import Samples, Session, State
from shoal.parallel.coalesced import broadcast_coalesced
from shoal.parallel.ddp import module as ddp
from shoal.testing import no_leaks, processes, run_threads

PATIENCE = 60.0


def begin(
    group: ProcessGroup, victim: int = -1, point: str = "", late: int = -1, width: int = 4
) -> tuple[bytes, int, float]:
    """Train two steps on a model with other values on each rank; ``victim`` dies on its way to the first, and
    ``late`` is still in the broadcast when it hears of that."""
    rank = group.rank

    def hear_of_the_death_in_the_broadcast(group: ProcessGroup, tensors: list[torch.Tensor]) -> None:
        ddp.broadcast_coalesced = broadcast_coalesced
        broadcast_coalesced(group, tensors)
        group.store.set("received", b"")
        group.recv(torch.empty(1), src=victim).wait()

    def reached(here: str) -> None:
        if (rank, here) == (victim, point):
            if late >= 0:
                group.store.wait(["received"])  # else it would begin with its own values
            os.kill(os.getpid(), signal.SIGKILL)

    net = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.fill_(1.0 + 10 * rank + number)
    state = State(model=net, samples=Samples(64, batch=16))
    with Session(state, group=group) as session:
        reached("before")
        model = session.parallel(net)
        reached("between")
        if (rank, point) == (victim, "in the broadcast"):
            ddp.broadcast_coalesced = lambda *_: reached(point)
        if rank == late:
            ddp.broadcast_coalesced = hear_of_the_death_in_the_broadcast
        for step in session.steps(until=2):
            with step:
                reached("in the step")
                (model(torch.ones(len(step.indices), 3)).mean() * step.weight).backward()
                step.commit()
    return state.digest(), session.group.size, net[0].weight[0, 0].item()


def test_ranks_begin_with_what_rank_0_holds() -> None:
    outcomes = run_threads(begin, 3)
    assert len(set(outcomes)) == 1
    assert outcomes[0][1:] == (3, 1.0)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", ["before", "between", "in the broadcast"])
def test_a_death_before_the_first_step_costs_nothing(victim: int, point: str) -> None:
    with no_leaks(), processes(begin, 3, victim, point, timeout=PATIENCE) as ranks:
        outcomes = ranks.join()
    survivors = [each.value for each in outcomes if each.rank != victim]
    assert all(each.ok for each in outcomes if each.rank != victim), [each.describe() for each in outcomes]
    assert survivors[0] == survivors[1]
    assert survivors[0][1] == 2
    # of rank 0, of the rank that took its place, or of a dead one that had sent its parameters
    assert survivors[0][2] in ({1.0} if victim else {1.0, 21.0})


@pytest.mark.parametrize(("victim", "late"), [(2, 0), (2, 1), (0, 2)])
def test_ranks_begin_alike_though_some_have_begun_when_a_rank_dies(victim: int, late: int) -> None:
    with no_leaks(), processes(begin, 3, victim, "in the step", late, timeout=PATIENCE) as ranks:
        outcomes = ranks.join()
    survivors = [each.value for each in outcomes if each.rank != victim]
    assert all(each.ok for each in outcomes if each.rank != victim), [each.describe() for each in outcomes]
    assert survivors[0] == survivors[1]
    assert survivors[0][1:] == (2, 1.0)


def test_other_models_are_named_before_the_first_step() -> None:
    def rank(group: ProcessGroup) -> None:
        with pytest.raises(ModelMismatch, match="rank 1: "):
            begin(group, width=4 + group.rank)

    run_threads(rank, 2)
