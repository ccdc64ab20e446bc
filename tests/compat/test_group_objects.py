"""What torch's group objects take and give beyond torch.distributed's functions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from .both import both

REDUCTIONS = {
    dist.ReduceOp.SUM: 21,
    dist.ReduceOp.PRODUCT: 1 * 2 * 10 * 8,
    dist.ReduceOp.MIN: 1,
    dist.ReduceOp.MAX: 10,
    dist.ReduceOp.BOR: 11,
    dist.ReduceOp.BXOR: 1 ^ 2 ^ 10 ^ 8,
}


def several(context):
    rank, size = context.rank, context.size
    for group in both(context):
        for op, expected in REDUCTIONS.items():
            options = dist.AllreduceOptions()
            options.reduceOp = op
            tensors = [torch.tensor([(1, 10)[rank]]), torch.tensor([(2, 8)[rank]])]
            result = group.allreduce(tensors, options).get_future().wait()
            assert [x.item() for x in tensors] == [expected] * 2
            assert [x.item() for x in result] == [expected] * 2

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 1, 2
        tensors = [torch.tensor([10.0 * rank + i]) for i in range(3)]
        group.broadcast(tensors, options).wait()
        assert [x.item() for x in tensors] == [12.0] * 3

        outputs = [[torch.zeros(1) for _ in range(2 * size)] for _ in range(2)]
        work = group.allgather(outputs, [torch.tensor([2.0 * rank + i]) for i in range(2)])
        result = work.get_future().wait()
        assert [[x.item() for x in out] for out in outputs] == [list(range(2 * size))] * 2
        assert [[x.item() for x in out] for out in result] == [list(range(2 * size))] * 2

        sparse = [
            torch.sparse_coo_tensor([[rank + i]], [1.0], (4,), check_invariants=False) for i in range(2)
        ]
        group.allreduce(sparse).wait()
        for x in sparse:
            assert x.to_dense().tolist() == [1.0, 2.0, 1.0, 0.0]


def test_several_tensors_of_a_rank(ranks):
    ranks(2).run(several)


def supported(context):
    for name in (
        "supports_splitting",
        "supports_coalescing",
        "supports_time_estimate",
        "_supports_time_estimate",
        "supports_reconfigure",
        "supports_window",
        "supports_abort_hooks",
        "supports_completion_hooks",
    ):
        assert getattr(context.group, name) is False, name
    # Those of torch's class that are properties look for a backend in C++, and raise.
    inherited = {name for name in dir(dist.ProcessGroup) if "supports_" in name}
    methods = {"supports_tensor_alloc"}
    assert all(getattr(context.group, name) is False for name in inherited - methods)
    assert context.group.supports_tensor_alloc(torch.device("cpu")) is True


def test_what_a_group_does_not_support_is_false(ranks):
    ranks(2).run(supported)


def twice(context):
    for group in both(context):
        x, y = torch.tensor([context.rank + 1]), torch.tensor([10])
        group.allreduce_coalesced([x, y, x]).wait()
        assert (x.item(), y.item()) == (3, 20)


def test_a_tensor_that_is_named_twice_is_reduced_once(ranks):
    ranks(2).run(twice)


def results(context):
    """The futures and results of what fills a list are that list, as Gloo's are."""
    size, x = context.size, torch.tensor([float(context.rank)])
    for group in both(context):
        out = [torch.zeros(1) for _ in range(size)]
        work = dist.all_gather(out, x, group=group, async_op=True)
        assert [y.item() for y in work.get_future().wait()] == list(range(size))
        work.wait()
        assert [y.item() for y in work.result()] == list(range(size))
        work = dist.gather(x, out if context.rank == 0 else None, group=group, async_op=True)
        assert [y.item() for y in work.get_future().wait()] == list(range(size))[: None if x == 0 else 0]
        work = dist.scatter(torch.zeros(1), out if context.rank == 0 else None, group=group, async_op=True)
        assert [y.item() for y in work.get_future().wait()] == [context.rank]


def test_results_of_what_fills_a_list(ranks):
    ranks(2).run(results)


def refused(context):
    x = torch.zeros(1)
    outputs = [torch.zeros(1) for _ in range(context.size)]
    for group in both(context):
        for root in (-1, context.size):
            for options, call in (
                (dist.GatherOptions(), lambda options, group=group: group.gather([outputs], [x], options)),
                (dist.ScatterOptions(), lambda options, group=group: group.scatter([x], [outputs], options)),
                (dist.BroadcastOptions(), lambda options, group=group: group.broadcast([x], options)),
                (dist.ReduceOptions(), lambda options, group=group: group.reduce([x], options)),
            ):
                options.rootRank = root
                with pytest.raises((RuntimeError, ValueError), match="root"):
                    call(options)
        for call in (
            lambda group=group: group.allreduce([x, torch.zeros(2)]),
            lambda group=group: group.broadcast([x, torch.zeros(1, dtype=torch.int64)]),
            lambda group=group: group.allgather([outputs], [x, x]),
        ):
            with pytest.raises((RuntimeError, ValueError)):
                call()
        dist.barrier(group=group)


def test_what_makes_no_sense_is_refused(ranks):
    ranks(2).run(refused)
