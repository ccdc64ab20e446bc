"""The collectives, with torch's names, arguments and global ranks.

Each finds its group, calls the operation of the same kind on it, and waits unless ``async_op`` is set.  What
they take and refuse is in ``docs/operations.md``; shapes, dtypes and roots are checked by the group.  In
all of them:

- ``group`` is what :func:`new_group` returned, or None for the default group.  In a rank that is not in it
  they warn and return None.
- ``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` ranks of the group.
- they return None when the operation is done (:func:`all_reduce` its tensor), or, with ``async_op=True``, a
  :class:`Work` at once.
- they raise ``UsageError`` at once for arguments that make no sense, and ``GroupError`` (from ``wait``
  of the work) when the operation fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common.wording import counted
from ..spec import SUM
from ..torch_terms.durations import Duration, seconds
from ..torch_terms.in_turn import in_turn
from ..torch_terms.reductions import ReduceOpLike, reduction
from .ranks import rank_in_group
from .state import GroupLike, member_group
from .work import Work, WorkTensor, finished


def all_reduce(
    tensor: torch.Tensor, op: ReduceOpLike = SUM, group: GroupLike = None, async_op: bool = False
) -> Work | WorkTensor | None:
    """Reduce ``tensor`` over all ranks, in place on every rank.

    Returns:
        A work with ``async_op=True``, else ``tensor`` as a :class:`WorkTensor`.
    """
    pg = member_group(group, "all_reduce")
    if pg is None:
        return None
    work = finished(pg.all_reduce(tensor, reduction(op)), (tensor,), async_op)
    return tensor.as_subclass(WorkTensor) if work is None else work


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy ``tensor`` of one rank into ``tensor`` of all others."""
    pg = member_group(group, "broadcast")
    if pg is None:
        return None
    root = rank_in_group(pg, "broadcast", "src", src, group_src)
    return finished(pg.broadcast(tensor, root), (tensor,), async_op)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: ReduceOpLike = SUM,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce ``tensor`` over all ranks into ``tensor`` of one; elsewhere it is only read."""
    pg = member_group(group, "reduce")
    if pg is None:
        return None
    root = rank_in_group(pg, "reduce", "dst", dst, group_dst)
    return finished(pg.reduce(tensor, root, reduction(op)), (tensor,), async_op)


def all_gather(
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Bring ``tensor`` of rank *r* to ``tensor_list[r]`` of all ranks; sizes may differ from rank to rank.

    Outputs may share memory, as in ``[buffer] * n``: the tensor of the last rank stays.
    """
    pg = member_group(group, "all_gather")
    if pg is None:
        return None
    if tensor_list is None:
        pg._call("all_gather").refuse(f"tensor_list must be given, a list of {counted(pg.size, 'tensor')}")
    return finished(in_turn(tensor_list, lambda out: pg.all_gather(tensor, out)), tensor_list, async_op)


def all_gather_single(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Bring ``input_tensor`` of all ranks, one after another, into ``output_tensor`` of all ranks."""
    pg = member_group(group, "all_gather_single")
    if pg is None:
        return None
    return finished(pg.all_gather_single(output_tensor, input_tensor), (output_tensor,), async_op)


#: An older name of the same.
all_gather_into_tensor = all_gather_single


def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Bring ``tensor`` of rank *r* to ``gather_list[r]`` of one rank (0 unless given); None elsewhere.

    Outputs may share memory: the tensor of the last rank stays.
    """
    pg = member_group(group, "gather")
    if pg is None:
        return None
    root = rank_in_group(pg, "gather", "dst", dst, group_dst, default=0)
    outputs = gather_list or None
    if outputs is None and pg.rank == root:
        pg._call("gather").refuse(
            f"gather_list must be given on the destination, a list of {counted(pg.size, 'tensor')}"
        )
    if outputs is None:
        return finished(pg.gather(tensor, None, root), (), async_op)
    return finished(in_turn(outputs, lambda out: pg.gather(tensor, out, root)), outputs, async_op)


def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Hand ``scatter_list[r]`` of one rank (0 unless given) to ``tensor`` of rank *r*; None elsewhere."""
    pg = member_group(group, "scatter")
    if pg is None:
        return None
    root = rank_in_group(pg, "scatter", "src", src, group_src, default=0)
    return finished(pg.scatter(tensor, scatter_list or None, root), (tensor,), async_op)


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: ReduceOpLike = SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce ``input_list[r]`` over all ranks into ``output`` of rank *r*."""
    pg = member_group(group, "reduce_scatter")
    if pg is None:
        return None
    return finished(pg.reduce_scatter(output, input_list, reduction(op)), (output,), async_op)


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOpLike = SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce ``input`` over all ranks and hand rank *r* the *r*-th of equal parts in ``output``."""
    pg = member_group(group, "reduce_scatter_single")
    if pg is None:
        return None
    return finished(pg.reduce_scatter_single(output, input, reduction(op)), (output,), async_op)


#: An older name of the same.
reduce_scatter_tensor = reduce_scatter_single


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Send ``input_tensor_list[r]`` to rank *r* and receive its part in ``output_tensor_list[r]``.

    Outputs may share memory: the tensor of the last rank stays.
    """
    pg = member_group(group, "all_to_all")
    if pg is None:
        return None
    future = in_turn(output_tensor_list, lambda out: pg.all_to_all(out, input_tensor_list))
    return finished(future, output_tensor_list, async_op)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Cut ``input`` along its first dimension, send part *r* to rank *r*, join what arrives in ``output``.

    Sizes are lengths along the first dimension; None or an empty list means equal parts.
    """
    pg = member_group(group, "all_to_all_single")
    if pg is None:
        return None
    future = pg.all_to_all_single(output, input, output_split_sizes or None, input_split_sizes or None)
    return finished(future, (output,), async_op)


def barrier(
    group: GroupLike = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Duration | None = None,
) -> Work | None:
    """Wait until every rank of the group has called it; ``device_ids`` means nothing here."""
    pg = member_group(group, "barrier")
    if pg is None:
        return None
    return finished(pg.barrier(timeout=seconds(timeout)), (), async_op)


def monitored_barrier(
    group: GroupLike = None, timeout: Duration | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier that names on every rank those that did not come in time.

    It names all of them, whatever ``wait_all_ranks`` says.

    Raises:
        OperationTimeout: ``ranks`` are those that did not come.  The group is aborted then.
    """
    pg = member_group(group, "monitored_barrier")
    if pg is not None:
        pg.monitored_barrier(timeout=seconds(timeout)).wait()
