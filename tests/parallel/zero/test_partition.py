"""Who owns what: even shares, the same on every rank, and less state for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.parallel.zero.partition import Partition
from shoal.testing import run_threads

from .training import mixed, train, zero


def _owners(sizes: list[int], ranks: int) -> list[int]:
    parameters = [torch.empty(size, requires_grad=True) for size in sizes]
    partition = Partition(ranks)
    partition.add(parameters)
    return [partition.owner(parameter) for parameter in parameters]


def test_the_largest_goes_to_the_rank_that_has_least() -> None:
    assert _owners([3, 10, 6, 5, 4], 2) == [1, 0, 1, 1, 0]
    assert _owners([1, 1, 1, 1], 2) == [0, 1, 0, 1]
    assert _owners([5], 3) == [0]


def test_frozen_parameters_and_later_ones_are_shared_out_by_themselves() -> None:
    partition = Partition(2)
    frozen = [torch.empty(100), torch.empty(90)]
    trained = [torch.empty(8, requires_grad=True), torch.empty(2, requires_grad=True)]
    partition.add([*frozen, *trained])
    assert [partition.owner(one) for one in (*frozen, *trained)] == [0, 1, 0, 1]
    later = torch.empty(1, requires_grad=True)
    partition.add([later])
    assert partition.owner(later) == 1
    assert partition.owner(trained[0]) == 0


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.SGD])
def test_the_state_of_a_rank_is_its_share(optimizer_class: type[torch.optim.Optimizer]) -> None:
    def model() -> nn.Module:
        return nn.Sequential(*[nn.Linear(32, 32, dtype=torch.float64) for _ in range(12)], nn.Linear(32, 3))

    options = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}

    def rank(group: shoal.ProcessGroup) -> int:
        own = mixed()
        optimizer = zero(own, group, optimizer_class, **options)
        train(own, optimizer, [0])
        deep = model()
        optimizer = zero(deep, group, optimizer_class, **options)
        for parameter in deep.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return sum(
            value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim()
        )

    (whole,) = run_threads(rank, 1)
    for size in (2, 4):
        parts = run_threads(rank, size)
        assert sum(parts) == whole
        assert max(parts) <= 1.05 * whole / size
