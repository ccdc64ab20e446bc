"""Reductions as scripts for torch write them."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from ..errors import UsageError
from ..spec import LEGAL_REDUCTIONS, ReduceOp

#: A :class:`shoal.ReduceOp`, its name in any case, or a value of ``torch.distributed.ReduceOp``.
ReduceOpLike: TypeAlias = Any


def reduction(op: ReduceOpLike) -> ReduceOp:
    """The :class:`shoal.ReduceOp` that ``op`` means.

    Raises:
        UsageError: it means none.
    """
    if op.__class__ is ReduceOp:
        return op
    if isinstance(op, str):
        return ReduceOp.of(op.lower())
    # torch's constants have a name; what `_make_nccl_premul_sum` returns has its kind in `op`, and a factor.
    kind = getattr(op, "op", op)
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or type(op).__module__.partition(".")[0] != "torch":
        raise UsageError(
            f"op={op!r}: expected a reduction such as ReduceOp.SUM, its name, or torch.distributed's value"
        )
    if name != "PREMUL_SUM":
        return ReduceOp.of(name.lower())
    if kind is op:
        raise UsageError(
            "op=PREMUL_SUM: the factor is missing; use shoal.ReduceOp.premul_sum(factor), or "
            "_make_nccl_premul_sum(factor) where the value must be torch's"
        )
    return ReduceOp.premul_sum(op.factor)


def supports_complex(reduceOp: ReduceOpLike) -> bool:
    """Whether a reduction has a meaning for complex numbers: SUM, AVG, PRODUCT and PREMUL_SUM have."""
    return reduction(reduceOp).code in LEGAL_REDUCTIONS[torch.complex64]


def _make_nccl_premul_sum(factor: float | torch.Tensor) -> ReduceOp:
    """SUM of the inputs, each multiplied by its rank's factor first: :meth:`shoal.ReduceOp.premul_sum`."""
    return ReduceOp.premul_sum(factor)
