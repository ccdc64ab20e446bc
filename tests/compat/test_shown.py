"""Operations are seen by torch's dispatch modes, as those of Gloo are."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from ..support import releases
from .both import both


def calls(size, rank, group):
    """One call of each operation of torch.distributed's functions."""
    x = torch.arange(2.0 * size)
    small = torch.zeros(2)
    parts = [torch.zeros(2) for _ in range(size)]
    dist.all_reduce(x, group=group)
    dist.all_gather(parts, small, group=group)
    dist.all_gather_into_tensor(x, small, group=group)
    dist.reduce_scatter_tensor(small, x, group=group)
    dist.reduce_scatter(small, parts, group=group)
    if releases.GLOO_ALL_TO_ALL:
        dist.all_to_all(parts, [torch.ones(2) for _ in range(size)], group=group)
    dist.all_to_all_single(x, x.clone(), [2] * size, [2] * size, group=group)
    dist.broadcast(small, 0, group=group)
    dist.reduce(small, 0, group=group)
    dist.gather(small, parts if rank == 0 else None, 0, group=group)
    dist.scatter(small, parts if rank == 0 else None, 0, group=group)
    group.allreduce_coalesced([x, small]).wait()
    return [x.tolist(), small.tolist()] + [part.tolist() for part in parts]


def counted(context):
    seen = []
    for group in both(context):
        with CommDebugMode() as mode:
            result = calls(context.size, context.rank, group)
        seen.append(({str(op): count for op, count in mode.comm_counts.items()}, result))
    (ours, result), (theirs, expected) = seen
    assert ours == theirs
    assert len(ours) == 11 + releases.GLOO_ALL_TO_ALL
    assert result == expected


def test_operations_are_counted(ranks):
    ranks(2).run(counted)


def in_the_backward_pass(context):
    totals = []
    for group in both(context):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3), process_group=group)
        with CommDebugMode() as mode:
            model(torch.ones(2, 3, requires_grad=True)).sum().backward()
        totals.append(dict(mode.comm_counts))
    assert totals[0] == totals[1] != {}


def test_operations_of_cpp_are_counted(ranks):
    ranks(2).run(in_the_backward_pass)
