"""What torch's callers pass, in shoal's terms."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

import shoal
from shoal.spec import PREMUL_SUM, REDUCTIONS
from shoal.torch_terms.arguments import limit, reduction, seconds


def test_torch_numbers_its_reductions_as_we_do() -> None:
    numbers = {op.name: op.code for op in (*REDUCTIONS, PREMUL_SUM)}
    assert numbers == {name: int(getattr(dist.ReduceOp, name)) for name in numbers}
    known = {name for name in dir(dist.ReduceOp) if name.isupper() and name != "UNUSED"}
    assert known == set(numbers)


@pytest.mark.parametrize("op", REDUCTIONS, ids=repr)
def test_a_reduction_of_torch_is_ours_of_the_same_name(op: shoal.ReduceOp) -> None:
    theirs = getattr(dist.ReduceOp, op.name)
    assert reduction(theirs) is reduction(dist.ReduceOp(theirs)) is op


def test_what_is_no_reduction_is_refused() -> None:
    for op in (0, None, dist, object()):
        with pytest.raises(shoal.UsageError, match="expected a reduction"):
            reduction(op)


def test_a_scaled_sum_has_its_factor() -> None:
    assert reduction(dist._make_nccl_premul_sum(2.5)) == shoal.ReduceOp.premul_sum(2.5)
    with pytest.raises(shoal.UsageError, match="the factor is missing"):
        reduction(dist.ReduceOp.PREMUL_SUM)


def test_a_limit_that_is_not_positive_says_nothing() -> None:
    assert limit(timedelta(milliseconds=1500)) == limit(1.5) == 1.5
    assert limit(None) is limit(timedelta(0)) is limit(timedelta(milliseconds=-1)) is limit(0) is None
    assert seconds(timedelta(0)) == 0.0
    with pytest.raises(shoal.UsageError, match="timedelta or a number"):
        limit("1")  # type: ignore[arg-type]
