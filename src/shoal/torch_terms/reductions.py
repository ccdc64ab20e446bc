"""Reductions as scripts for torch write them."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from ..errors import UsageError
from ..spec import LEGAL_REDUCTIONS, PREMUL_SUM, REDUCTIONS, ReduceOp
from ..torch_features import premul_factor

#: A :class:`shoal.ReduceOp`, its name in any case, or a value of ``torch.distributed.ReduceOp``.
ReduceOpLike: TypeAlias = Any

#: Torch numbers its reductions as shoal does, which a test compares.
_BY_NUMBER = {op.code: op for op in REDUCTIONS}
#: Torch's classes of reductions that were seen: small messages are spared the look at names.
_torch_classes: set[type] = set()


def reduction(op: ReduceOpLike) -> ReduceOp:
    """The :class:`shoal.ReduceOp` that ``op`` means.

    Raises:
        UsageError: it means none, or PREMUL_SUM comes without its factor.
    """
    if op.__class__ is ReduceOp:
        return op
    if op.__class__ not in _torch_classes:
        if isinstance(op, str):
            return ReduceOp.of(op.lower())
        if not type(op).__module__.startswith("torch."):
            raise UsageError(
                f"op={op!r}: expected a reduction such as ReduceOp.SUM, its name, or a value of "
                "torch.distributed.ReduceOp"
            )
        _torch_classes.add(type(op))
    # A torch.distributed.ReduceOp has its constant in `op`.  Asking for a name takes three times as long.
    kind: Any = getattr(op, "op", op)
    known = _BY_NUMBER.get(number := int(kind))
    if known is not None:
        return known
    if number != PREMUL_SUM.code:
        return ReduceOp.of(kind.name.lower())
    if kind is op:
        raise UsageError(
            "op=PREMUL_SUM: the factor is missing; use shoal.ReduceOp.premul_sum(factor), or "
            "_make_nccl_premul_sum(factor) where the value must be torch's"
        )
    return ReduceOp.premul_sum(premul_factor(op))


def supports_complex(reduceOp: ReduceOpLike) -> bool:
    """Whether a reduction has a meaning for complex numbers: SUM, AVG, PRODUCT and PREMUL_SUM have."""
    return reduction(reduceOp).code in LEGAL_REDUCTIONS[torch.complex64]


def _make_nccl_premul_sum(factor: float | torch.Tensor) -> ReduceOp:
    """SUM of the inputs, each multiplied by its rank's factor first: :meth:`shoal.ReduceOp.premul_sum`."""
    return ReduceOp.premul_sum(factor)
