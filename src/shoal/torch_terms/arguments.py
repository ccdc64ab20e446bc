"""Torch's spellings of arguments: timeouts, converted to seconds, and reductions."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeAlias

import torch

from .. import config
from ..errors import UsageError
from ..spec import LEGAL_REDUCTIONS, ReduceOp
from ..spec import ReduceOpLike as ReduceOpLike

#: A ``timedelta``, as in torch, or a number of seconds.
Duration: TypeAlias = timedelta | float

#: The default timeout of operations: shoal's, not torch's 30 minutes.
default_pg_timeout = timedelta(seconds=config.TIMEOUT.default)

#: The timeout of closing a group, in seconds, where torch's function has no argument for it.
CLOSE_TIMEOUT_S = 10.0


def seconds(timeout: Duration | None) -> float | None:
    """Return a duration in seconds, or None for None.

    Raises:
        UsageError: ``timeout`` is neither a ``timedelta`` nor a number.
    """
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if isinstance(timeout, (int, float)):
        return float(timeout)
    raise UsageError(f"timeout: expected a timedelta or a number of seconds, got {timeout!r}")


def limit(timeout: Duration | None) -> float | None:
    """Return a duration in seconds, or None for None, zero and negative values (torch: no limit)."""
    given = timeout.total_seconds() if timeout.__class__ is timedelta else seconds(timeout)
    return None if given is None or given <= 0 else given


#: Converts shoal's and torch's spellings of a reduction to a :class:`shoal.ReduceOp`.
reduction = ReduceOp.of


def supports_complex(reduceOp: ReduceOpLike) -> bool:
    """Return whether a reduction is defined for complex numbers (SUM, AVG, PRODUCT, PREMUL_SUM)."""
    return reduction(reduceOp).code in LEGAL_REDUCTIONS[torch.complex64]


def _make_nccl_premul_sum(factor: float | torch.Tensor) -> ReduceOp:
    """Sum of the inputs, each first multiplied by its rank's factor; :meth:`shoal.ReduceOp.premul_sum`."""
    return ReduceOp.premul_sum(factor)
