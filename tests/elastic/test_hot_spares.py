"""Hot spares: ranks above the active ones compute every step, count nothing, and take over at once."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from shoal import ProcessGroup, StateDiverged, UsageError
from shoal.elastic import Samples, Session, State, Step
from shoal.testing import no_leaks, processes, run_threads

from .training import Log, Training, assert_as_undisturbed, train

PATIENCE = 60.0


def trained(group: ProcessGroup, active: int | None, workers: int | None = None) -> Log:
    return train(group, active=active, workers=workers)


@pytest.mark.parametrize("workers", [None, 0])
def test_a_run_with_hot_spares_is_that_of_its_active_ranks_in_every_bit(workers: int | None) -> None:
    """Sums with zeros, and a division by two more, are exact."""
    spared = run_threads(trained, 4, 2, workers)
    alone = run_threads(trained, 2, None)
    assert [each.digest for each in spared[3].steps] == [each.digest for each in alone[0].steps]
    assert_as_undisturbed(spared, active=2)


def test_every_sample_counts_once_however_many_ranks_there_are() -> None:
    samples = Samples(50, batch=12)
    for size in range(1, 8):
        for active in range(1, 9):
            shares = [samples.share(rank, size, active=active) for rank in range(size)]
            taking = [share for share in shares if share.weight]
            assert len(taking) == min(active, size)
            assert torch.cat([share.indices for share in taking]).equal(samples.share(0, 1).indices)
            for share in shares[active:]:
                assert share.indices.equal(shares[share.rank].indices)
            means = [share.weight * share.indices.double().mean().item() for share in shares]
            assert sum(means) / size == pytest.approx(samples.share(0, 1).indices.double().mean().item())


def dying(group: ProcessGroup, deaths: list[tuple[int, str, int]]) -> Log:
    mine = [(number, point) for number, point, rank in deaths if rank == group.rank]

    def visit(here: str, step: Step) -> None:
        if (step.number, here) in mine:
            os.kill(os.getpid(), signal.SIGKILL)

    return train(group, visit, active=2)


def test_hot_spares_take_the_places_of_active_ranks_that_die() -> None:
    deaths = [(2, "in backward", 0), (5, "before commit", 3), (9, "after commit", 1)]
    with no_leaks(), processes(dying, 5, deaths, timeout=PATIENCE) as ranks:
        outcomes = ranks.join()
    logs = [each.value for each in outcomes if each.ok]
    assert len(logs) == 2, [each.describe() for each in outcomes]
    assert_as_undisturbed(logs, active=2)
    assert [event.size for event in logs[0].events] == [4, 3, 2]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="active=0: expected a positive integer"):
        Session(Training().state, active=0)
    with pytest.raises(UsageError, match="active= needs samples"):
        Session(State(), active=1)


def test_ranks_must_agree_on_how_many_are_active() -> None:
    def rank(group: ProcessGroup) -> None:
        with pytest.raises(StateDiverged, match="rank 1 has different parameters, optimisers or samples"):
            trained(group, 1 + group.rank)

    run_threads(rank, 2)
