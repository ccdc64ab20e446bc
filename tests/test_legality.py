"""The table of kinds, dtypes and reductions in spec.py, against the kernels and against groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal import _core
from shoal.errors import UnsupportedOperation
from shoal.group import ProcessGroup
from shoal.spec import DTYPE_CODES, PREMUL_SUM, REDUCING, REDUCTIONS, OpKind, ReduceOp, why_illegal
from shoal.testing import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

OPS = (*REDUCTIONS, ReduceOp.premul_sum(2.0))
KINDS = [kind for kind in OpKind if kind is not OpKind.BARRIER]
CASES = [(kind, dtype, op) for kind in KINDS for dtype in DTYPE_CODES for op in OPS]


def test_every_combination_is_refused_in_words_or_legal() -> None:
    refused = [problem for case in CASES if (problem := why_illegal(*case)) is not None]
    assert len(refused) == 77 * len(REDUCING)
    assert why_illegal(OpKind.SEND, torch.qint8) == "tensors of torch.qint8 cannot be sent"
    assert why_illegal(OpKind.REDUCE, torch.float8_e5m2) == (
        "tensors of torch.float8_e5m2 can be copied but not reduced"
    )
    assert why_illegal(OpKind.ALL_REDUCE, torch.complex64, ReduceOp.MIN) == (
        "MIN has no meaning for torch.complex64; it can be reduced with AVG, PREMUL_SUM, PRODUCT or SUM"
    )


@pytest.mark.parametrize("level", range(_core.kernels.highest_level() + 1))
def test_the_kernels_run_what_is_legal_and_refuse_the_rest(level: int) -> None:
    kernels = _core.kernels
    kernels.set_level(level)
    try:
        for dtype, code in DTYPE_CODES.items():
            x, y = torch.ones(3).to(dtype), torch.zeros(3).to(dtype)
            for op in OPS:
                reduction = kernels.Reduction(code, op.code)
                if why_illegal(OpKind.ALL_REDUCE, dtype, op) is None:
                    kernels.reduce(reduction, [y.data_ptr()], [x.data_ptr()], 3)
                    assert torch.equal(x, y), (dtype, op)
                else:
                    with pytest.raises(ValueError, match=f"no reduction {op.name} of {str(dtype)[6:]}"):
                        kernels.reduce(reduction, [y.data_ptr()], [x.data_ptr()], 3)
    finally:
        kernels.set_level(kernels.highest_level())


def _send_and_receive(group: ProcessGroup, x: torch.Tensor) -> Any:
    other = 1 - group.rank
    future = group.recv(torch.empty_like(x), other)
    group.send(x, other).wait()
    return future


CALLS: dict[OpKind, Callable[[ProcessGroup, torch.Tensor, ReduceOp], Any]] = {
    OpKind.ALL_REDUCE: lambda group, x, op: group.all_reduce(x, op),
    OpKind.REDUCE: lambda group, x, op: group.reduce(x, 0, op),
    OpKind.REDUCE_SCATTER: lambda group, x, op: group.reduce_scatter(x, [x.clone(), x.clone()], op),
    OpKind.BROADCAST: lambda group, x, _: group.broadcast(x, 0),
    OpKind.ALL_GATHER: lambda group, x, _: group.all_gather(x),
    OpKind.GATHER: lambda group, x, _: group.gather(x),
    OpKind.SCATTER: lambda group, x, _: group.scatter(x, [x.clone(), x.clone()] if group.rank == 0 else None),
    OpKind.ALL_TO_ALL: lambda group, x, _: group.all_to_all([x, x.clone()], [x.clone(), x.clone()]),
    OpKind.SEND: lambda group, x, _: _send_and_receive(group, x),
    OpKind.RECV: lambda group, x, _: _send_and_receive(group, x),
}


def test_groups_run_what_is_legal_and_refuse_the_rest_in_the_same_words() -> None:
    def run_all(group: ProcessGroup) -> int:
        refused = 0
        for kind, dtype, op in CASES:
            if kind not in REDUCING and op is not OPS[0]:
                continue
            x = torch.ones(3).to(dtype)
            problem = why_illegal(kind, dtype, op)
            if problem is None:
                CALLS[kind](group, x, op).wait()
            else:
                with pytest.raises(UnsupportedOperation) as caught:
                    CALLS[kind](group, x, op)
                assert str(caught.value).endswith(problem)
                refused += 1
        return refused

    assert run_threads(run_all, 2) == [77 * len(REDUCING)] * 2


def test_a_product_is_summed_where_a_scaled_sum_is_legal() -> None:
    """PREMUL_SUM reaches the core as its own code, of tensors that are multiplied already."""
    for dtype, code in DTYPE_CODES.items():
        legal = why_illegal(OpKind.ALL_REDUCE, dtype, PREMUL_SUM) is None
        assert legal == _core.kernels.legal(code, PREMUL_SUM.code)
