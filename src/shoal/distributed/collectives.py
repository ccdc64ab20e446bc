"""The collectives, with torch's names, arguments and global ranks.

``docs/operations.md`` documents the operations; the group checks shapes, dtypes and roots.  Common to all:

- ``group``: a result of :func:`new_group`, or None for the default group.  On a rank outside the group they
  warn and return None.
- ``src`` and ``dst`` are global ranks; ``group_src`` and ``group_dst`` are ranks in the group.
- They block and return None (:func:`all_reduce`: its tensor), or, with ``async_op=True``, return a
  :class:`Work` immediately.
- They raise ``UsageError`` immediately for invalid arguments, and ``GroupError`` (with ``async_op=True``:
  from ``wait`` of the work) if the operation fails.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from ..common.formatting import counted
from ..future import Future
from ..spec import SUM, ReduceOp
from ..torch_terms import coalesced
from ..torch_terms.aliased_outputs import with_distinct_outputs
from ..torch_terms.arguments import Duration, ReduceOpLike, reduction, seconds
from .groups import rank_in_group
from .state import GroupLike, member_group
from .work import Work, WorkTensor, work_or_wait

Function = TypeVar("Function", bound=Callable[..., Any])


def all_reduce(
    tensor: torch.Tensor, op: ReduceOpLike = SUM, group: GroupLike = None, async_op: bool = False
) -> Work | WorkTensor | None:
    """All-reduce ``tensor`` in place.

    Returns:
        A work with ``async_op=True``, else ``tensor`` as a :class:`WorkTensor`.
    """
    if (pg := member_group(group, "all_reduce")) is None:
        return None
    work = work_or_wait(pg.all_reduce(tensor, reduction(op)), (tensor,), async_op)
    return tensor.as_subclass(WorkTensor) if work is None else work


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy ``tensor`` of the root into ``tensor`` of all other ranks."""
    if (pg := member_group(group, "broadcast")) is None:
        return None
    root = rank_in_group(pg, "broadcast", "src", src, group_src)
    return work_or_wait(pg.broadcast(tensor, root), (tensor,), async_op)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: ReduceOpLike = SUM,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce ``tensor`` of all ranks into ``tensor`` of the destination; on other ranks it is unchanged."""
    if (pg := member_group(group, "reduce")) is None:
        return None
    root = rank_in_group(pg, "reduce", "dst", dst, group_dst)
    return work_or_wait(pg.reduce(tensor, root, reduction(op)), (tensor,), async_op)


def all_gather(
    tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """Gather ``tensor`` of rank *r* into ``tensor_list[r]`` on all ranks; sizes may differ between ranks.

    Outputs may share memory, as in ``[buffer] * n``: then it holds the tensor of the last rank.
    """
    if (pg := member_group(group, "all_gather")) is None:
        return None
    if tensor_list is None:
        pg._call("all_gather").refuse(f"tensor_list must be given, a list of {counted(pg.size, 'tensor')}")
    return work_or_wait(
        with_distinct_outputs(tensor_list, lambda out: pg.all_gather(out, tensor)), tensor_list, async_op
    )


def all_gather_single(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """Concatenate ``input_tensor`` of all ranks into ``output_tensor`` on all ranks."""
    if (pg := member_group(group, "all_gather_single")) is None:
        return None
    return work_or_wait(pg.all_gather_single(output_tensor, input_tensor), (output_tensor,), async_op)


#: The older name of :func:`all_gather_single`.
all_gather_into_tensor = all_gather_single


def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather ``tensor`` of rank *r* into ``gather_list[r]`` on the destination (default: rank 0).

    ``gather_list`` is None on other ranks.  Outputs may share memory: then it holds the last rank's tensor.
    """
    if (pg := member_group(group, "gather")) is None:
        return None
    root = rank_in_group(pg, "gather", "dst", dst, group_dst, default=0)
    outputs = gather_list or None
    if outputs is None and pg.rank == root:
        pg._call("gather").refuse(
            f"gather_list must be given on the destination, a list of {counted(pg.size, 'tensor')}"
        )
    if outputs is None:
        return work_or_wait(pg.gather(tensor, None, root), (), async_op)
    return work_or_wait(
        with_distinct_outputs(outputs, lambda out: pg.gather(tensor, out, root)), outputs, async_op
    )


def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy ``scatter_list[r]`` of the source (default: rank 0; None elsewhere) to ``tensor`` of rank *r*."""
    if (pg := member_group(group, "scatter")) is None:
        return None
    root = rank_in_group(pg, "scatter", "src", src, group_src, default=0)
    return work_or_wait(pg.scatter(tensor, scatter_list or None, root), (tensor,), async_op)


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: ReduceOpLike = SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce ``input_list[r]`` of all ranks into ``output`` of rank *r*."""
    if (pg := member_group(group, "reduce_scatter")) is None:
        return None
    return work_or_wait(pg.reduce_scatter(output, input_list, reduction(op)), (output,), async_op)


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOpLike = SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce ``input`` over all ranks and store the *r*-th of its equal parts in ``output`` of rank *r*."""
    if (pg := member_group(group, "reduce_scatter_single")) is None:
        return None
    return work_or_wait(pg.reduce_scatter_single(output, input, reduction(op)), (output,), async_op)


#: The older name of :func:`reduce_scatter_single`.
reduce_scatter_tensor = reduce_scatter_single


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Send ``input_tensor_list[r]`` to rank *r* and receive from rank *r* into ``output_tensor_list[r]``.

    Outputs may share memory: then it holds the tensor of the last rank.
    """
    if (pg := member_group(group, "all_to_all")) is None:
        return None
    future = with_distinct_outputs(output_tensor_list, lambda out: pg.all_to_all(out, input_tensor_list))
    return work_or_wait(future, output_tensor_list, async_op)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Split ``input`` along dimension 0, send part *r* to rank *r*, concatenate received parts in ``output``.

    Split sizes are lengths along dimension 0; None or an empty list means equal parts.
    """
    if (pg := member_group(group, "all_to_all_single")) is None:
        return None
    future = pg.all_to_all_single(output, input, output_split_sizes or None, input_split_sizes or None)
    return work_or_wait(future, (output,), async_op)


def barrier(
    group: GroupLike = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Duration | None = None,
) -> Work | None:
    """Block until all ranks of the group have called it; ``device_ids`` is ignored."""
    if (pg := member_group(group, "barrier")) is None:
        return None
    return work_or_wait(pg.barrier(timeout=seconds(timeout)), (), async_op)


def monitored_barrier(
    group: GroupLike = None, timeout: Duration | None = None, wait_all_ranks: bool = False
) -> None:
    """Barrier that reports the missing ranks on every rank (all of them, also without ``wait_all_ranks``).

    Raises:
        OperationTimeout: ``ranks`` are those that did not call it in time.  The group is aborted.
    """
    pg = member_group(group, "monitored_barrier")
    if pg is not None:
        pg.monitored_barrier(timeout=seconds(timeout)).wait()


# -- torch's deprecated names, with its ``FutureWarning`` ----------------------------------------


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
    if (pg := member_group(group, "all_reduce_coalesced")) is None:
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
    if (pg := member_group(group, "all_gather_coalesced")) is None:
        return None
    future = coalesced.all_gather(pg, "all_gather_coalesced", output_tensor_lists, input_tensor_list)
    return _finished(future, output_tensor_lists, async_op)


def _finished(future: Future[Any], value: Any, async_op: bool) -> Future[Any] | None:
    if async_op:
        return future.then(lambda done: (done.value(), value)[1])
    future.wait()
    return None


def _deprecated(name: str, function: Function) -> Function:
    """Return ``function`` under the deprecated name ``name``."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _warn(name, function.__name__)
        return function(*args, **kwargs)

    return cast(Function, call)


_all_gather_base = _deprecated("_all_gather_base", all_gather_single)
_reduce_scatter_base = _deprecated("_reduce_scatter_base", reduce_scatter_single)


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
