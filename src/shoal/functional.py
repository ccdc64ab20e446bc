"""Differentiable collective operations.

    y = shoal.functional.all_reduce(x, group=group)        # a new tensor, with x in its graph
    y.square().sum().backward()                            # communicates too

Unlike the methods of a group, and like ``torch.distributed.nn.functional``, these functions are part of
autograd's graph.  They block, and return new tensors.

The gradient of such an operation is a collective too.  So all ranks must build the same graph, with inputs
that require grad on all ranks or on none, and all must call backward.  If a call has several outputs, a rank
must use at least one; unused outputs have a gradient of zero.

:func:`broadcast` can be differentiated once, the others any number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .errors import UnsupportedOperation
from .group import ProcessGroup
from .group.group_argument import resolve_group
from .spec import AVG, PREMUL_SUM, SUM, ReduceOp, ReduceOpLike

__all__ = ["all_gather", "all_reduce", "all_to_all", "all_to_all_single", "broadcast", "reduce_scatter"]


def all_reduce(x: torch.Tensor, op: ReduceOpLike = SUM, *, group: object = None) -> torch.Tensor:
    """The reduction of ``x`` over all ranks.

    Args:
        x: same dtype and shape on all ranks.
        op: SUM, AVG or ``ReduceOp.premul_sum(factor)``; the gradients of other reductions are not
        collectives.
        group: the ranks; None: the default group.

    Returns:
        A new tensor like ``x``.  The gradient of ``x`` is the sum (or mean) of the gradients of all ranks.

    Raises:
        UsageError, UnsupportedOperation, GroupError: see the method of the group.
    """
    return _apply(_AllReduce, x, resolve_group(group, "functional.all_reduce"), _linear(op, "all_reduce"))


def all_gather(x: torch.Tensor, *, group: object = None) -> tuple[torch.Tensor, ...]:
    """The tensors of all ranks, in the order of the ranks.

    Args:
        x: same dtype and shape on all ranks.
        group: the ranks; None: the default group.

    Returns:
        New tensors.  The gradient of ``x`` is the sum of the gradients of its copies on all ranks.
    """
    return _apply_to_list(_AllGather, x, resolve_group(group, "functional.all_gather"))


def reduce_scatter(
    inputs: Sequence[torch.Tensor], op: ReduceOpLike = SUM, *, group: object = None
) -> torch.Tensor:
    """The reduction of ``inputs[r]`` over all ranks, on rank *r*.

    Args:
        inputs: one tensor per rank, all with the same dtype and shape.
        op: SUM or AVG.
        group: the ranks; None: the default group.

    Returns:
        A new tensor.  The gradient of ``inputs[r]`` is that of the result on rank *r*.
    """
    reduction = _linear(op, "reduce_scatter")
    if reduction.code == PREMUL_SUM.code:
        raise UnsupportedOperation(
            "functional.reduce_scatter takes SUM and AVG; multiply the inputs yourself"
        )
    return _apply(_ReduceScatter, resolve_group(group, "functional.reduce_scatter"), reduction, *inputs)


def broadcast(x: torch.Tensor, root: int = 0, *, group: object = None) -> torch.Tensor:
    """A copy of ``x`` of rank ``root``.

    Args:
        x: same dtype and shape on all ranks; the values on ranks other than ``root`` are not used.  It must
            require grad on all ranks or on none.
        root: the rank to copy from.
        group: the ranks; None: the default group.

    Returns:
        A new tensor.  The gradient of ``x`` is the sum of the gradients of all ranks on ``root``, else zero.
    """
    return _apply(_Broadcast, x, resolve_group(group, "functional.broadcast"), root)


def all_to_all(inputs: Sequence[torch.Tensor], *, group: object = None) -> tuple[torch.Tensor, ...]:
    """Send ``inputs[r]`` to rank *r*, and return the tensors that all ranks send to this one.

    Args:
        inputs: one tensor per rank, all with the same dtype and shape on all ranks.  For parts of different
            sizes use :func:`all_to_all_single`.
        group: the ranks; None: the default group.

    Returns:
        New tensors.  The gradient of ``inputs[r]`` is that of the tensor that rank *r* received.
    """
    return _apply_to_list(_AllToAll, resolve_group(group, "functional.all_to_all"), *inputs)


def all_to_all_single(
    x: torch.Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    *,
    group: object = None,
) -> torch.Tensor:
    """Split ``x`` along its first dimension, send part *r* to rank *r*, and concatenate the received parts.

    Args:
        x: has at least one dimension.
        output_splits, input_splits: length of the part of each rank; None: equal parts.
        group: the ranks; None: the default group.

    Returns:
        A new tensor.  Its gradient is sent back in the same way.
    """
    ranks = resolve_group(group, "functional.all_to_all_single")
    return _apply(_AllToAllSingle, x, ranks, output_splits, input_splits)


def _linear(op: ReduceOpLike, name: str) -> ReduceOp:
    """Return the reduction if its gradient is a reduction too; otherwise raise UnsupportedOperation."""
    reduction = ReduceOp.of(op)
    if reduction.code not in (SUM.code, AVG.code, PREMUL_SUM.code):
        raise UnsupportedOperation(
            f"functional.{name}: gradients do not flow through {reduction!r}; use SUM, AVG or "
            "ReduceOp.premul_sum(factor), or the method of the group on x.detach()"
        )
    return reduction


def _apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def _apply_to_list(function: type[torch.autograd.Function], *args: Any) -> tuple[torch.Tensor, ...]:
    result: tuple[torch.Tensor, ...] = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, op: ReduceOp) -> torch.Tensor:
        ctx.group, ctx.op = group, op
        out = x.detach().clone(memory_format=torch.contiguous_format)
        group.all_reduce(out, op).wait()
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.op.code == PREMUL_SUM.code:
            return _apply(_AllReduce, gradient, ctx.group, SUM) * ctx.op.factor, None, None
        return _apply(_AllReduce, gradient, ctx.group, ctx.op), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(group.all_gather(x.detach().contiguous()).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _apply(_ReduceScatter, ctx.group, SUM, *gradients), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, op: ReduceOp, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.group, ctx.op = group, op
        plain = [x.detach().contiguous() for x in inputs]
        return group.reduce_scatter(torch.empty_like(plain[group.rank]), plain, op).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.op.code == AVG.code:
            gradient = gradient / ctx.group.size
        return None, None, *_apply_to_list(_AllGather, gradient, ctx.group)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, root: int) -> torch.Tensor:
        ctx.group, ctx.root = group, root
        out = x.detach().clone(memory_format=torch.contiguous_format)
        group.broadcast(out, root).wait()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        summed = ctx.group.reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.root).wait()
        return torch.zeros_like(gradient) if summed is None else summed, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        plain = [x.detach().contiguous() for x in inputs]
        return tuple(group.all_to_all([torch.empty_like(x) for x in plain], plain).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *_apply_to_list(_AllToAll, ctx.group, *gradients)


class _AllToAllSingle(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: ProcessGroup,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
    ) -> torch.Tensor:
        ctx.group, ctx.splits = group, (output_splits, input_splits)
        plain = x.detach().contiguous()
        length = sum(output_splits) if output_splits is not None else plain.shape[0] if plain.dim() else 0
        out = plain.new_empty((length, *plain.shape[1:]))
        return group.all_to_all_single(out, plain, output_splits, input_splits).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        output_splits, input_splits = ctx.splits
        return _apply(_AllToAllSingle, gradient, ctx.group, input_splits, output_splits), None, None, None
