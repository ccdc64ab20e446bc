"""Reductions in torch's spelling, also as torch's own values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed

import shoal
import shoal.distributed as dist
from shoal.torch_terms.arguments import reduction

NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


@pytest.mark.parametrize("name", NAMES)
def test_torchs_values_and_names_mean_the_same(name: str) -> None:
    ours, theirs = getattr(dist.ReduceOp, name), getattr(torch.distributed.ReduceOp, name)
    assert ours is getattr(shoal.ReduceOp, name)
    others = (ours, theirs, torch.distributed.ReduceOp(theirs), name, name.lower())
    assert all(reduction(op) is ours for op in others)
    complex_too = name in ("SUM", "AVG", "PRODUCT")
    assert dist.supports_complex(theirs) == complex_too


def test_a_factor_comes_along() -> None:
    expected = shoal.ReduceOp.premul_sum(2.5)
    assert dist._make_nccl_premul_sum(2.5) == expected
    assert dist._make_nccl_premul_sum(torch.tensor(2.5)) == expected
    assert reduction(torch.distributed._make_nccl_premul_sum(2.5)) == expected
    assert reduction(torch.distributed._make_nccl_premul_sum(torch.tensor([2.5]))) == expected
    for given in (np.float32(2.5), np.float64(2.5), torch.tensor([[2.5]], dtype=torch.bfloat16)):
        assert dist._make_nccl_premul_sum(given) == expected
    assert dist._make_nccl_premul_sum(torch.tensor(2.5, requires_grad=True)) == expected
    assert dist._make_nccl_premul_sum(2).factor == 2.0
    with pytest.raises(shoal.UsageError, match="the factor is missing"):
        reduction(torch.distributed.ReduceOp.PREMUL_SUM)


@pytest.mark.parametrize(
    ("factor", "problem"),
    [
        (torch.ones(3), "a tensor of 3 elements, shape \\(3,\\); each rank gives one"),
        (torch.ones(0), "a tensor of 0 elements"),
        (torch.ones(1, device="meta"), "a tensor on meta; pass its value"),
        (torch.tensor(2), "a tensor of torch.int64; pass factor.double"),
        (torch.tensor(True), "a tensor of torch.bool"),
        (torch.tensor(2j), "a tensor of torch.complex64"),
        (2j, "got 2j"),
        (True, "got True"),
        ("2", "got '2'"),
        (None, "got None"),
        ([2.0], "got \\[2.0\\]"),
        (10**400, "a whole number that no float can hold"),
    ],
    ids=repr,
)
def test_what_is_no_factor_is_refused_in_words(factor: Any, problem: str) -> None:
    with pytest.raises(shoal.UsageError, match=f"the factor of PREMUL_SUM must be a real number.* {problem}"):
        dist._make_nccl_premul_sum(factor)


def test_a_factor_of_torchs_is_looked_at_when_it_is_used() -> None:
    with pytest.raises(shoal.UsageError, match=r"a tensor of torch\.int64"):
        reduction(torch.distributed._make_nccl_premul_sum(torch.tensor(3)))


@pytest.mark.parametrize("op", [None, 3, "total", torch.float32, NAMES])
def test_what_is_no_reduction_is_refused(op: object) -> None:
    with pytest.raises(shoal.UsageError, match="expected a"):
        reduction(op)
