"""The reductions of the core, for engines that only move bytes.  Without the GIL."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .. import _core
from ..spec import DTYPE_CODES, SUM, ReduceOp


def reduction_kernel(
    dtype: torch.dtype, op: ReduceOp = SUM, size: int = 1
) -> Callable[[list[int], list[int], int], None]:
    """Return the core's reduction kernel for one dtype.

    Args:
        size: the number of ranks, for AVG.

    Returns:
        A function of destination addresses, source addresses and an element count.  It writes the reduction
        of all sources, in their order and rounded once, to every destination; a destination may be a source.
    """
    reduction = _core.kernels.Reduction(DTYPE_CODES[dtype], op.code, size)
    return partial(_core.kernels.reduce, reduction)
