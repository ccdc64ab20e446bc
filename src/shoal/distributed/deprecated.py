"""Names that torch keeps for old scripts; they emit torch's ``FutureWarning``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ..future import Future
from ..spec import SUM, ReduceOp
from ..torch_terms import coalesced
from ..torch_terms.reductions import ReduceOpLike, reduction
from .collectives import all_gather_single, reduce_scatter_single
from .state import GroupLike, member_group
from .work import Work


def _warn(name: str, instead: str) -> None:
    warnings.warn(f"{name} is deprecated; use {instead}", FutureWarning, stacklevel=3)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor] | torch.Tensor,
    op: ReduceOpLike = SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Future[Any] | None:
    """All-reduce several tensors, each in place.  A tensor that is listed twice is reduced once.

    With ``async_op=True``, return a future of the list.
    """
    _warn("all_reduce_coalesced", "all_reduce for each tensor")
    pg = member_group(group, "all_reduce_coalesced")
    if pg is None:
        return None
    if not isinstance(tensors, (torch.Tensor, Sequence)):
        pg._call("all_reduce_coalesced").refuse(f"expected a list of tensors, got {type(tensors).__name__}")
    several = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    future = coalesced.all_reduce(pg, several, reduction(op))
    return _finished(future, several, async_op)


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[torch.Tensor]],
    input_tensor_list: Sequence[torch.Tensor],
    group: GroupLike = None,
    async_op: bool = False,
) -> Future[Any] | None:
    """Gather ``input_tensor_list[i]`` of rank *r* into ``output_tensor_lists[r][i]`` on all ranks.

    With ``async_op=True``, return a future of ``output_tensor_lists``.
    """
    _warn("all_gather_coalesced", "all_gather for each tensor")
    pg = member_group(group, "all_gather_coalesced")
    if pg is None:
        return None
    future = coalesced.all_gather(pg, "all_gather_coalesced", output_tensor_lists, input_tensor_list)
    return _finished(future, output_tensor_lists, async_op)


def _finished(future: Future[Any], value: Any, async_op: bool) -> Future[Any] | None:
    if async_op:
        return future.then(lambda done: (done.value(), value)[1])
    future.wait()
    return None


def _all_gather_base(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Deprecated name of :func:`all_gather_single`."""
    _warn("_all_gather_base", "all_gather_single")
    return all_gather_single(output_tensor, input_tensor, group, async_op)


def _reduce_scatter_base(
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOpLike = SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Deprecated name of :func:`reduce_scatter_single`."""
    _warn("_reduce_scatter_base", "reduce_scatter_single")
    return reduce_scatter_single(output, input, op, group, async_op)


class _ReduceOpNames:
    """The attributes of ``reduce_op``, which emit a warning."""

    def __getattr__(self, name: str) -> ReduceOp:
        if name.startswith("_"):
            raise AttributeError(name)
        value: ReduceOp = getattr(ReduceOp, name)
        _warn("reduce_op", "ReduceOp")
        return value


#: Deprecated name of ``ReduceOp``: ``reduce_op.SUM`` is ``ReduceOp.SUM``, with a warning.
reduce_op = _ReduceOpNames()
