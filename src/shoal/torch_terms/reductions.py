"""Reductions as scripts for torch write them."""

from __future__ import annotations

import torch

from ..spec import LEGAL_REDUCTIONS, ReduceOp
from ..spec import ReduceOpLike as ReduceOpLike

#: The :class:`shoal.ReduceOp` that a value stands for, in shoal's words or torch's.
reduction = ReduceOp.of


def supports_complex(reduceOp: ReduceOpLike) -> bool:
    """Whether a reduction has a meaning for complex numbers: SUM, AVG, PRODUCT and PREMUL_SUM have."""
    return reduction(reduceOp).code in LEGAL_REDUCTIONS[torch.complex64]


def _make_nccl_premul_sum(factor: float | torch.Tensor) -> ReduceOp:
    """SUM of the inputs, each multiplied by its rank's factor first: :meth:`shoal.ReduceOp.premul_sum`."""
    return ReduceOp.premul_sum(factor)
