"""Functional collectives, and torch.compile over them and over torch.distributed's functions."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import Shard, distribute_tensor

from shoal import UnsupportedOperation

from ..support import releases
from .both import both
from .values import assert_all_same, assert_same, value

by_size = pytest.mark.parametrize("size", [2, 4])


def everybody(context, shape, seed=0):
    return [value(rank, torch.float32, shape, seed=seed) for rank in range(context.size)]


def collectives(context):
    size, rank = context.size, context.rank
    parts = everybody(context, (size, 4))
    total = sum(parts)
    for group in both(context):
        x = parts[rank].clone()
        # Not waited for: what uses the result waits.
        assert_same(funcol.all_reduce(x, "sum", group) + 0, total)
        assert_same(x, parts[rank])
        assert_same(funcol.wait_tensor(funcol.all_reduce(x, "max", group)), torch.stack(parts).amax(0))
        assert_same(funcol.all_reduce(x, "avg", group) * 1, total / size)
        assert_same(funcol.broadcast(x, 1, group) * 1, parts[1])
        assert_same(funcol.all_gather_tensor(x, 0, group) * 1, torch.cat(parts))
        assert_same((funcol.all_gather_tensor(x, 1, group) * 1).contiguous(), torch.cat(parts, dim=1))
        assert_same(releases.functional_all_gather_single(x, 0, group) * 1, torch.cat(parts))
        assert_same(funcol.reduce_scatter_tensor(x, "sum", 0, group) * 1, total[rank : rank + 1])
        assert_same(releases.functional_reduce_scatter_single(x, "sum", 0, group) * 1, total[rank : rank + 1])
        columns = funcol.reduce_scatter_tensor(x, "sum", 1, group) * 1
        assert_same(columns.contiguous(), total.chunk(size, dim=1)[rank].contiguous())
        assert_same(
            funcol.all_to_all_single(x, None, None, group) * 1, torch.stack([part[rank] for part in parts])
        )
        xs = [x, torch.full((3,), float(rank))]
        sums = [sum(parts), torch.full((3,), float(sum(range(size))))]
        assert_all_same([y * 1 for y in funcol.all_reduce_coalesced(xs, "sum", group)], sums)
        gathered = [torch.cat(parts), torch.arange(size).float().repeat_interleave(3)]
        assert_all_same([y * 1 for y in funcol.all_gather_into_tensor_coalesced(xs, group)], gathered)
        xs = [x, torch.full((2 * size,), float(rank))]
        scattered = [total[rank : rank + 1], torch.full((2,), float(sum(range(size))))]
        results = funcol.reduce_scatter_tensor_coalesced(xs, "sum", [0, 0], group)
        assert_all_same([y * 1 for y in results], scattered)
        waited = funcol.all_reduce(x, "sum", group)
        del waited  # nobody asks for it
        assert_same(funcol.all_reduce(x.t(), "sum", group).t().contiguous(), total)


def uneven(context):
    size, rank = context.size, context.rank
    for group in both(context):
        send = [(rank + peer) % 3 for peer in range(size)]
        receive = [(peer + rank) % 3 for peer in range(size)]
        x = torch.full((sum(send), 2), float(rank))
        out = funcol.all_to_all_single(x, receive, send, group) * 1
        expected = torch.cat([torch.full((count, 2), float(peer)) for peer, count in enumerate(receive)])
        assert_same(out, expected)


def in_place(context):
    size, rank = context.size, context.rank
    parts = everybody(context, (size, 2))
    for group in both(context):
        x = parts[rank].clone()
        funcol.all_reduce_inplace(x, "sum", group)
        assert_same(x, sum(parts))
        x = parts[rank].clone()
        assert_same(
            funcol.all_gather_tensor_inplace(torch.zeros(size * size, 2), x, group) * 1, torch.cat(parts)
        )
        out = torch.zeros(1, 2)
        assert_same(
            funcol.reduce_scatter_tensor_inplace(out, x, "sum", group) * 1, sum(parts)[rank : rank + 1]
        )


def gradients(context):
    size, rank = context.size, context.rank
    for group in both(context):
        x = value(rank, torch.float32, (size, 2)).requires_grad_()
        weights = everybody(context, (size * size, 2), seed=1)
        y = funcol.all_gather_tensor_autograd(x, 0, group)
        (y * weights[rank]).sum().backward()
        assert_same(x.grad, sum(weights)[rank * size : (rank + 1) * size])

        x = value(rank, torch.float32, (size, 2)).requires_grad_()
        weights = everybody(context, (1, 2), seed=2)
        y = funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group)
        (y * weights[rank]).sum().backward()
        assert_same(x.grad, torch.cat(weights))

        x = value(rank, torch.float32, (size, 2)).requires_grad_()
        weights = everybody(context, (size, 2), seed=3)
        y = funcol.all_to_all_single_autograd(x, None, None, group)
        (y * weights[rank]).sum().backward()
        assert_same(x.grad, torch.stack([weight[rank] for weight in weights]))


def other_groups(context):
    """A group may be given as a mesh, a mesh and a dimension, or a list of ranks."""
    mesh = dist.init_device_mesh("cpu", (context.size,))
    x = torch.full((2,), float(context.rank))
    expected = torch.full((2,), float(sum(range(context.size))))
    for group in (mesh, (mesh, 0), list(range(context.size)), dist.group.WORLD.group_name):
        assert_same(funcol.all_reduce(x, "sum", group) * 1, expected)


CASES = [collectives, uneven, in_place, gradients, other_groups]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@by_size
def test_functional_collectives(ranks, size, case):
    ranks(size).run(case)


def remapped(context):
    """What torch.compile makes of torch.distributed's own functions."""

    def step(x, group):
        y = 2 * x
        dist.all_reduce(y, group=group)
        out = y.new_empty(context.size * len(y))
        releases.all_gather_single(out, y + 1, group=group)
        return out * 3

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for group in both(context):
        x = value(context.rank, torch.float32, (5,))
        assert_same(compiled(x, group), step(x, group))


def collect(x, group):
    total = funcol.all_reduce(x, "sum", group)
    wide = funcol.all_gather_tensor(total, 0, group)
    mine = funcol.reduce_scatter_tensor(wide, "max", 0, group)
    return total, wide, mine, funcol.all_to_all_single(x, None, None, group)


def compiled(context, backend):
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes that outlive the test
    function = torch.compile(collect, backend=backend, fullgraph=True)
    for group in both(context):
        x = value(context.rank, torch.float32, (4, 3))
        assert_all_same(function(x, group), [y * 1 for y in collect(x, group)])


def compiled_gradient(context):
    def loss(x, group):
        gathered = funcol.all_gather_tensor_autograd(x * x, 0, group)
        rank = dist.get_rank(group) if releases.COMPILES_GET_RANK else context.rank
        return (gathered * (rank + 1)).sum()

    function = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for group in both(context):
        x = value(context.rank, torch.float32, (3,)).requires_grad_()
        function(x, group).backward()
        assert_same(x.grad, 2 * x.detach() * sum(range(1, context.size + 1)))


@pytest.mark.parametrize("case", [remapped, compiled_gradient], ids=lambda case: case.__name__)
def test_torch_compile(ranks, case):
    ranks(2).run(case)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.stress)])
def test_torch_compile_over_functional_collectives(ranks, backend):
    ranks(2).run(compiled, backend, limit=120)


def handed_on(context):
    """What a functional collective gave and nobody used yet goes into torch.distributed's functions."""
    size, rank = context.size, context.rank
    total = sum(everybody(context, (size, 2)))
    for group in both(context):

        def fresh(group=group):
            x = funcol.all_reduce(value(rank, torch.float32, (size, 2)), "sum", group)
            assert isinstance(x, funcol.AsyncCollectiveTensor)
            return x

        x = fresh()
        dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
        assert_same(x * 1, total)
        outs = [torch.zeros(size, 2) for _ in range(size)]
        dist.all_gather(outs, fresh(), group=group)
        assert_all_same(outs, [total] * size)
        out = torch.zeros(size * size, 2)
        releases.all_gather_single(out, fresh(), group=group)
        assert_same(out, total.repeat(size, 1))
        out = torch.zeros(1, 2)
        releases.reduce_scatter_single(out, fresh(), dist.ReduceOp.MAX, group=group)
        assert_same(out, total[rank : rank + 1])
        out = torch.zeros(size, 2)
        dist.all_to_all_single(out, fresh(), group=group)
        assert_same(out, total[rank : rank + 1].repeat(size, 1))
        releases.all_to_all(list(out.split(1)), [fresh()[0:1] * 1] * size, group=group)
        dist.broadcast(fresh(), 0, group=group)
        dist.gather(fresh(), outs if rank == 0 else None, 0, group=group)
        dist.all_reduce_coalesced([torch.ones(2), fresh()[0]], group=group)
        if rank == 0:
            dist.send(fresh(), 1, group=group)
        elif rank == 1:
            fresh()
            out = torch.zeros(size, 2)
            dist.recv(out, 0, group=group)
            assert_same(out, total)
        else:
            fresh()


@by_size
def test_results_of_functional_collectives_may_be_handed_on(ranks, size):
    ranks(size).run(handed_on)


def without_memory(context):
    """A distributed tensor stands for several; nothing can be done with it as a whole."""
    mesh = dist.init_device_mesh("cpu", (context.size,))
    x = distribute_tensor(torch.ones(context.size), mesh, [Shard(0)])
    with pytest.raises(UnsupportedOperation, match="DTensor"):
        dist.all_reduce(x)
    y = x.to_local()
    dist.all_reduce(y)
    assert_same(y, torch.full((1,), float(context.size)))


def test_a_tensor_without_memory_is_refused(ranks):
    ranks(2).run(without_memory)
