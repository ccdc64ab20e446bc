"""Ranks that left out a backward pass are told so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import OutOfStep
from tests.parallel.training import on_ranks, pairwise, wrapped


@pytest.mark.parametrize(
    ("dtype", "find_unused_parameters"),
    [
        (torch.float32, False),
        (torch.float64, False),
        (torch.bfloat16, False),
        (torch.complex64, False),
        (torch.float32, True),
    ],
)
@on_ranks(3)
def test_a_forward_pass_without_backward_on_one_rank_is_named_on_all(
    group: shoal.ProcessGroup, dtype: torch.dtype, find_unused_parameters: bool
) -> None:
    layer = nn.Linear(3, 2, dtype=dtype)
    model = wrapped(group, layer, find_unused_parameters=find_unused_parameters)
    x = torch.ones(1, 3, dtype=dtype)
    model(x).abs().sum().backward()
    if group.rank == 1:
        model(x)  # the loss was no number, say, and the step was left out
    with pytest.raises(OutOfStep, match="rank 0: 1\n  rank 1: 2\n  rank 2: 1\n"):
        model(x).abs().sum().backward()
    model(x).abs().sum().backward()  # the group is well


@pairwise(size=[2, 3, 7], dtype=[torch.float32, torch.bfloat16, torch.float16])
@on_ranks("size")
def test_passes_that_all_ranks_leave_out_or_run_twice_are_fine(
    group: shoal.ProcessGroup, dtype: torch.dtype
) -> None:
    x = torch.ones(1, 3, dtype=dtype)
    model = wrapped(group, nn.Linear(3, 2, dtype=dtype))
    for count in (*range(1, 17), 40):
        outputs = [model(x) for _ in range(count)]
        outputs[-1].sum().backward()


@pytest.mark.parametrize("size", [3, 8])
@on_ranks("size")
def test_one_pass_more_among_many_is_noticed(group: shoal.ProcessGroup) -> None:
    model = wrapped(group, nn.Linear(3, 2))
    x = torch.ones(1, 3)
    for count in range(1, 15):
        outputs = [model(x) for _ in range(count + (group.rank == 1))]
        with pytest.raises(OutOfStep):
            outputs[-1].sum().backward()


@on_ranks(2)
def test_a_rank_may_run_forward_by_itself_to_evaluate(group: shoal.ProcessGroup) -> None:
    x = torch.ones(1, 6, dtype=torch.float64)
    model = wrapped(group)
    for _ in range(2):
        if group.rank == 0:
            with torch.no_grad():
                model(x)
            model.eval()
            model(x)
            model.train()
        model(x).sum().backward()
