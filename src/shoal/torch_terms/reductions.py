"""Torch's spellings of reductions."""

from __future__ import annotations

import torch

from ..spec import LEGAL_REDUCTIONS, ReduceOp
from ..spec import ReduceOpLike as ReduceOpLike

#: Converts shoal's and torch's spellings of a reduction to a :class:`shoal.ReduceOp`.
reduction = ReduceOp.of


def supports_complex(reduceOp: ReduceOpLike) -> bool:
    """Return whether a reduction is defined for complex numbers (SUM, AVG, PRODUCT, PREMUL_SUM)."""
    return reduction(reduceOp).code in LEGAL_REDUCTIONS[torch.complex64]


def _make_nccl_premul_sum(factor: float | torch.Tensor) -> ReduceOp:
    """Sum of the inputs, each first multiplied by its rank's factor; :meth:`shoal.ReduceOp.premul_sum`."""
    return ReduceOp.premul_sum(factor)
