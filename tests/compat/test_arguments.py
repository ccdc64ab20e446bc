"""What torch's callers pass, in our terms."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

import shoal
from shoal.compat.arguments import reduction, seconds

NAMES = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


@pytest.mark.parametrize("name", NAMES)
def test_a_reduction_of_torch_is_ours_of_the_same_name(name):
    theirs = getattr(dist.ReduceOp, name)
    assert reduction(theirs) == reduction(dist.ReduceOp(theirs)) == getattr(shoal.ReduceOp, name)


def test_a_scaled_sum_has_its_factor():
    assert reduction(dist._make_nccl_premul_sum(2.5)) == shoal.ReduceOp.premul_sum(2.5)
    with pytest.raises(shoal.UsageError, match="the factor is missing"):
        reduction(dist.ReduceOp.PREMUL_SUM)


def test_a_timeout_that_is_not_positive_says_nothing():
    assert seconds(timedelta(milliseconds=1500)) == 1.5
    assert seconds(None) is seconds(timedelta(0)) is seconds(timedelta(milliseconds=-1)) is None
