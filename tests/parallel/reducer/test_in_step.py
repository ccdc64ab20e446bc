"""Ranks that left out a backward pass are told so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import OutOfStep
from shoal.testing import run_threads
from tests.parallel.models import mlp
from tests.parallel.training import on_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_a_forward_pass_without_backward_on_one_rank_is_named_on_all(
    dtype: torch.dtype, find_unused_parameters: bool
) -> None:
    def rank(group: shoal.ProcessGroup) -> str:
        model = shoal.DistributedDataParallel(
            nn.Linear(3, 2, dtype=dtype), group=group, find_unused_parameters=find_unused_parameters
        )
        x = torch.ones(1, 3, dtype=dtype)
        model(x).abs().sum().backward()
        if group.rank == 1:
            model(x)  # the loss was no number, say, and the step was left out
        with pytest.raises(OutOfStep) as caught:
            model(x).abs().sum().backward()
        model(x).abs().sum().backward()  # the group is well
        return str(caught.value)

    for message in run_threads(rank, 3):
        assert "rank 0: 1\n  rank 1: 2\n  rank 2: 1\n" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 6, 7])
def test_passes_that_all_ranks_leave_out_or_run_twice_are_fine(size: int, dtype: torch.dtype) -> None:
    x = torch.ones(1, 3, dtype=dtype)

    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(nn.Linear(3, 2, dtype=dtype), group=group)
        for count in (*range(1, 17), 40):
            outputs = [model(x) for _ in range(count)]
            outputs[-1].sum().backward()

    run_threads(rank, size)


@pytest.mark.parametrize("size", [3, 8])
def test_one_pass_more_among_many_is_noticed(size: int) -> None:
    def rank(group: shoal.ProcessGroup) -> None:
        model = shoal.DistributedDataParallel(nn.Linear(3, 2), group=group)
        x = torch.ones(1, 3)
        for count in range(1, 15):
            outputs = [model(x) for _ in range(count + (group.rank == 1))]
            with pytest.raises(OutOfStep):
                outputs[-1].sum().backward()

    run_threads(rank, size)


@on_ranks(2)
def test_a_rank_may_run_forward_by_itself_to_evaluate(group: shoal.ProcessGroup) -> None:
    x = torch.ones(1, 6, dtype=torch.float64)

    model = shoal.DistributedDataParallel(mlp(), group=group)
    for _ in range(2):
        if group.rank == 0:
            with torch.no_grad():
                model(x)
            model.eval()
            model(x)
            model.train()
        model(x).sum().backward()
