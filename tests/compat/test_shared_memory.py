"""Lists that name one memory several times: what Gloo takes, the backend and shoal.distributed take."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ..support import releases
from .both import both


def ones(value, count=2):
    return torch.full((count,), float(value))


def shared_outputs(context):
    """What stands in the end in outputs that share memory, by the name of the case, for each backend."""
    rank, size = context.rank, context.size
    found = []
    for group in both(context):
        results = {}

        buffer = torch.zeros(2)
        dist.all_gather([buffer] * size, ones(rank), group=group)
        results["all_gather"] = buffer.tolist()

        buffer = torch.zeros(size + 1)
        views = [buffer[r : r + 2] for r in range(size)]
        dist.all_gather(views, ones(rank), group=group, async_op=True).wait()
        results["all_gather of views"] = buffer.tolist()

        x = ones(rank)
        dist.all_gather([x] * size, x, group=group)
        results["all_gather into the input"] = x.tolist()

        buffer = torch.zeros(2)
        dist.gather(ones(rank), [buffer] * size if rank == 1 else None, 1, group=group)
        results["gather"] = buffer.tolist()

        buffer = torch.zeros(2)
        releases.all_to_all([buffer] * size, [ones(10 * rank + r) for r in range(size)], group=group)
        results["all_to_all"] = buffer.tolist()

        buffers = [torch.zeros(2), torch.zeros(1)]
        dist.all_gather_coalesced([buffers] * size, [ones(rank), ones(rank + 5, 1)], group=group)
        results["all_gather_coalesced"] = [x.tolist() for x in buffers]

        out = [[torch.zeros(1)] * (2 * size)] * 2
        group.allgather(out, [ones(rank, 1), ones(rank + 5, 1)]).wait()
        results["several"] = out[0][0].tolist()

        x, y = ones(rank + 1), ones(1)
        dist.all_reduce_coalesced([x, y, x[:1], x], group=group)
        results["all_reduce_coalesced"] = (x.tolist(), y.tolist())

        found.append(results)
    assert all(results == found[0] for results in found), found
    last = size - 1
    assert found[0]["all_gather"] == [last] * 2
    assert found[0]["all_gather of views"] == [*range(size), last]
    assert found[0]["several"] == [last + 5]
    return found[0]


@pytest.mark.parametrize("size", [2, 4])
def test_the_last_rank_stays_in_outputs_that_share_memory(ranks, size):
    ranks(size).run(shared_outputs)


def beyond_gloo(context):
    """Outputs that Gloo cannot do: a leaf, a matrix beside its transpose."""
    rank, size = context.rank, context.size
    matrix = torch.zeros(2, size)
    dist.all_gather([matrix[:, r] for r in range(size)], ones(rank))
    assert matrix.tolist() == [list(range(size))] * 2
    square = torch.zeros(size, size)
    outputs = [square.t(), *[square] * (size - 1)]
    dist.all_gather(outputs, (10 * rank + torch.arange(size * size)).view(size, size).float())
    assert square.flatten().tolist() == [10 * (size - 1) + i for i in range(size * size)]
    leaf = ones(rank).requires_grad_()
    dist.all_gather([leaf] * size, ones(rank))
    assert leaf.tolist() == [size - 1] * 2


def test_outputs_that_share_memory_and_are_leaves_or_not_contiguous(ranks):
    ranks(4).run(beyond_gloo)


def shared_inputs(context):
    size = context.size
    for group in both(context):
        x, out = ones(context.rank + 1), torch.zeros(2)
        dist.reduce_scatter(out, [x] * size, group=group)
        assert out.tolist() == [size * (size + 1) / 2] * 2
        outputs = [torch.zeros(2) for _ in range(size)]
        releases.all_to_all(outputs, [x] * size, group=group)
        assert [y.tolist() for y in outputs] == [[r + 1.0] * 2 for r in range(size)]
        releases.all_to_all(outputs, outputs, group=group)
        assert [y.tolist() for y in outputs] == [[context.rank + 1.0] * 2] * size
        dist.scatter(out, [x] * size if context.rank == 0 else None, 0, group=group)
        assert out.tolist() == [1.0] * 2
        whole = torch.zeros(2 * size)
        whole[2 * context.rank : 2 * context.rank + 2] = context.rank + 1
        releases.all_gather_single(whole, whole[2 * context.rank : 2 * context.rank + 2], group=group)
        assert whole.tolist() == [r + 1.0 for r in range(size) for _ in range(2)]


@pytest.mark.parametrize("size", [2, 4])
def test_inputs_may_share_memory_with_each_other_and_with_outputs(ranks, size):
    ranks(size).run(shared_inputs)


def other_shapes(context):
    """Parts of an all-to-all that have equally many elements, in tensors of other shapes."""
    size = context.size
    for group in both(context):
        x = (100 * context.rank + torch.arange(4.0 * size)).view(2 * size, 2)
        expected = [100.0 * r + 4 * context.rank + i for r in range(size) for i in range(4)]
        out = torch.zeros(4 * size)
        dist.all_to_all_single(out, x, group=group)
        assert out.tolist() == expected
        out = torch.zeros(size, 2, 2)
        dist.all_to_all_single(out, x, [1] * size, [2] * size, group=group)
        assert out.flatten().tolist() == expected


def test_all_to_all_single_of_tensors_of_other_shapes(ranks):
    ranks(2).run(other_shapes)


def refused(context):
    """What Gloo refuses on the rank that errs, without a word to the others, is refused so here."""
    rank, size = context.rank, context.size
    x, outputs = ones(rank), [torch.zeros(2) for _ in range(size)]
    gather, scatter = dist.GatherOptions(), dist.ScatterOptions()
    gather.rootRank = scatter.rootRank = 0
    longer = torch.zeros(2 * size + 1)
    for group in both(context):
        calls = [
            lambda group=group: dist.all_to_all_single(x, longer, [1] * 2, [1] * 2, group=group),
            lambda group=group: dist.all_to_all_single(longer, x, [1] * 2, [1] * 2, group=group),
            lambda group=group: dist.all_to_all_single(x, x, [2], [2], group=group),
            lambda group=group: group.allgather_coalesced([outputs], [x, x]),
            lambda group=group: dist.gather(x, outputs, 1 - rank, group=group),
            lambda group=group: dist.scatter(x, outputs, 1 - rank, group=group),
            # the same of the group object, which torch's functions do not look at
            lambda group=group: group.gather([outputs[:1] if rank == 0 else outputs], [x], gather),
            lambda group=group: group.scatter([x], [outputs[:1] if rank == 0 else outputs], scatter),
        ]
        for call in calls:
            with pytest.raises((RuntimeError, ValueError)):
                call()
        y = torch.ones(1)
        dist.all_reduce(y, group=group)
        assert y.item() == size


def test_what_gloo_refuses_here_is_refused_and_the_group_goes_on(ranks):
    ranks(2).run(refused)
