"""Reductions in torch's spelling, also as torch's own values."""

from __future__ import annotations

import pytest
import torch
import torch.distributed

import shoal
import shoal.distributed as dist
from shoal.distributed.reductions import reduction

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
    with pytest.raises(shoal.UsageError, match="the factor is missing"):
        reduction(torch.distributed.ReduceOp.PREMUL_SUM)


@pytest.mark.parametrize("op", [None, 3, "total", torch.float32, NAMES])
def test_what_is_no_reduction_is_refused(op: object) -> None:
    with pytest.raises(shoal.UsageError, match="expected a"):
        reduction(op)
