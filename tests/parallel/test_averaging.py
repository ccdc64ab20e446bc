"""Averaging parameters: when, over whom, and what comes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.parallel.averaging import average_parameters
from shoal.testing import run_threads
from tests.parallel.hooks.buckets import count_sent, same_on_all
from tests.parallel.training import on_ranks


def own(rank: int, shape: tuple[int, ...] = (5, 3)) -> torch.Tensor:
    random = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=random, dtype=torch.float64)


def parameter(rank: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(own(rank).to(dtype))


def mean(ranks: Any) -> torch.Tensor:
    return sum((own(rank) for rank in ranks), torch.zeros(5, 3)) / len(ranks)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_trained_parameters_become_their_mean_on_all_ranks(size: int) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]

    def rank(group: shoal.ProcessGroup) -> Any:
        parameters = [parameter(group.rank, dtype) for dtype in dtypes * 2]
        frozen = nn.Parameter(own(group.rank), requires_grad=False)
        strided = nn.Parameter(own(group.rank, (4, 6)).t())
        assert not strided.is_contiguous()
        held = [p.data_ptr() for p in parameters]
        average_parameters([*parameters, frozen, strided], group)
        assert [p.data_ptr() for p in parameters] == held
        assert torch.equal(frozen, own(group.rank))
        torch.testing.assert_close(strided.detach(), (sum(own(r, (4, 6)) for r in range(size)) / size).t())
        return [p.detach() for p in parameters]

    for averaged in same_on_all(run_threads(rank, size)):
        tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(averaged.dtype, 1e-6)
        expected = mean(range(size)).to(averaged.dtype)
        torch.testing.assert_close(averaged, expected, rtol=tolerance, atol=tolerance)


@on_ranks(3)
def test_large_models_go_in_several_messages_and_the_groups_of_an_optimiser_are_taken_too(
    group: shoal.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.parallel.coalesced.MESSAGE_BYTES", 300)
    parameters = [parameter(group.rank) for _ in range(7)]
    optimizer = torch.optim.SGD([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.5}], lr=1.0)
    sent = count_sent(group)
    average_parameters(optimizer.param_groups, group)
    assert sent == [30, 30, 30, 15]
    for averaged in parameters:
        torch.testing.assert_close(averaged.detach(), mean(range(3)))


@on_ranks(2)
def test_the_period_begins_right_after_the_warm_up(group: shoal.ProcessGroup) -> None:
    averager = shoal.PeriodicModelAverager(3, 2, group=group)
    mine = parameter(group.rank)
    for step in range(12):
        with torch.no_grad():
            mine.copy_(own(group.rank))
        averager.average_parameters([mine])
        assert torch.equal(mine, own(group.rank)) == (step not in (2, 5, 8, 11))
    assert averager.step == 12


@on_ranks(8)
def test_the_largest_group_whose_period_it_is_averages(group: shoal.ProcessGroup) -> None:
    averager = shoal.HierarchicalModelAverager({2: 2, 4: 4, 8: 8}, 3, group=group)
    sizes = [one.size for one in averager.period_process_group_dict.values()]
    assert sizes == [2, 4, 8]
    first = {size: group.rank // size * size for size in (2, 4, 8)}
    mine = parameter(group.rank)
    for step in range(17):
        with torch.no_grad():
            mine.copy_(own(group.rank))
        averager.average_parameters([mine])
        size = 1 if step < 3 else 8 if step % 8 == 0 else 4 if step % 4 == 0 else 2 if step % 2 == 0 else 1
        start = first.get(size, group.rank)
        torch.testing.assert_close(mine.detach(), mean(range(start, start + size)))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "must give a group size for each period"),
        ({0: 4}, "a period must be a positive number of steps, got 0"),
        ({4: 2, 2: 4}, "periods of period_group_size_dict must grow, got 2 after 4"),
        ({2: 3, 4: 4}, "must be a multiple of the one before, got 4 after 3"),
        ({2: 2, 4: 8}, "must be that of the group, 4, got 8"),
        ({2: 2}, "must be that of the group, 4, got 2"),
    ],
)
@on_ranks(4)
def test_hierarchies_that_do_not_fit_are_refused(
    group: shoal.ProcessGroup, sizes: dict[int, int], message: str
) -> None:
    with pytest.raises(shoal.UsageError, match=message):
        shoal.HierarchicalModelAverager(sizes, group=group)


@on_ranks(1)
def test_other_arguments_without_meaning_are_refused(group: shoal.ProcessGroup) -> None:
    with pytest.raises(shoal.UsageError, match="a period must be a positive number of steps, got 0"):
        shoal.PeriodicModelAverager(0, group=group)
    with pytest.raises(shoal.UsageError, match="warmup_steps must be a number of steps, got -1"):
        shoal.PeriodicModelAverager(2, -1, group=group)
    with pytest.raises(shoal.UsageError, match="no default group of shoal"):
        shoal.PeriodicModelAverager(2, group=None)  # type: ignore[arg-type]
    averager = shoal.PeriodicModelAverager(2, group=group)
    with pytest.raises(shoal.UsageError, match="got str"):
        averager.average_parameters(["weight"])  # type: ignore[list-item]
    sgd = torch.optim.SGD([parameter(0)], lr=1.0)
    with pytest.raises(shoal.UsageError, match="optim must be an optimiser of torch, got list"):
        shoal.PostLocalSGDOptimizer([], averager)  # type: ignore[arg-type]
    with pytest.raises(shoal.UsageError, match=r"averager must be a Periodic.*got int"):
        shoal.PostLocalSGDOptimizer(sgd, 4)  # type: ignore[arg-type]


@on_ranks(1)
def test_averaging_in_every_step_is_warned_of(group: shoal.ProcessGroup) -> None:
    with pytest.warns(UserWarning, match="choose a longer period"):
        shoal.PeriodicModelAverager(1, group=group)
    with pytest.warns(UserWarning, match="choose a longer period"):
        shoal.HierarchicalModelAverager({1: 1}, group=group)


def test_the_optimiser_steps_averages_and_obeys_a_schedule() -> None:
    def rank(group: shoal.ProcessGroup) -> Any:
        mine = parameter(group.rank)
        inner = torch.optim.SGD([mine], lr=0.5)
        optimizer = shoal.PostLocalSGDOptimizer(inner, shoal.PeriodicModelAverager(2, 1, group=group))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        seen = []
        optimizer.register_step_post_hook(lambda *_: seen.append(mine.detach().clone()))
        for _ in range(3):
            optimizer.zero_grad()
            assert mine.grad is None
            loss = optimizer.step(lambda: _loss(mine, group.rank))
            assert loss.shape == ()
            schedule.step()
        assert inner.param_groups[0]["lr"] == pytest.approx(0.05)
        assert len(seen) == 3
        return seen, mine.detach()

    (seen0, end0), (seen1, end1) = run_threads(rank, 2)
    # Steps 0 and 2 stay on each rank; after step 1 both have the mean, so they differ again at the end.
    assert not torch.equal(end0, end1)
    middle = (seen0[1] + seen1[1]) / 2
    for before, end, which in ((seen0, end0, 0), (seen1, end1, 1)):
        assert torch.equal(before[2], end)
        torch.testing.assert_close(end, middle - 0.05 * own(which + 10))


def _loss(mine: nn.Parameter, rank: int) -> torch.Tensor:
    loss = (mine * own(rank + 10)).sum()
    loss.backward()
    return loss


@on_ranks(1)
def test_the_optimiser_state_holds_the_step_of_the_averager(group: shoal.ProcessGroup) -> None:
    def make() -> shoal.PostLocalSGDOptimizer:
        inner = torch.optim.Adam([parameter(0)], lr=0.5)
        return shoal.PostLocalSGDOptimizer(inner, shoal.PeriodicModelAverager(4, group=group))

    first, second = make(), make()
    for _ in range(3):
        first.step()
    state = first.state_dict()
    assert state["step"] == 3
    second.load_state_dict(state)
    assert second.averager.step == 3
    assert state["step"] == 3  # what was loaded from is as before
    assert second.param_groups is second.optim.param_groups
    with pytest.warns(UserWarning, match="counts from 0"):
        second.load_state_dict(first.optim.state_dict())
    assert second.averager.step == 0
    second.add_param_group({"params": [parameter(1)], "lr": 0.1})
    assert len(second.optim.param_groups) == 2
