"""all_reduce, reduce and reduce_scatter: every reduction and dtype, beside Gloo and beside arithmetic."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shoal import UsageError

from ..support import releases
from .both import both, layouts
from .values import (
    COMPLEX,
    DTYPES,
    FLOAT8,
    FLOATS,
    OPS,
    assert_all_same,
    assert_same,
    legal,
    reduce_op,
    reduced,
    value,
    with_gloo,
)

REDUCTIONS = [(op, dtype) for op in OPS for dtype in DTYPES if dtype not in FLOAT8 and legal(op, dtype)]
PREMUL = [("PREMUL_SUM", dtype) for dtype in (*FLOATS, *COMPLEX)]


def names(values):
    return [f"{op}-{str(dtype).removeprefix('torch.')}" for op, dtype in values]


# -- all_reduce ----------------------------------------------------------------------------------


def all_reduce(context, op, dtype):
    expected = reduced(op, [value(rank, dtype) for rank in range(context.size)], factor=0.5)
    for group in both(context, gloo=with_gloo(op, dtype)):
        for layout in layouts(context, group):
            x = layout(value(context.rank, dtype))
            assert dist.all_reduce(x, reduce_op(op, context.rank, 0.5), group=group) is None
            assert_same(x, expected)
            x = layout(value(context.rank, dtype))
            dist.all_reduce(x, reduce_op(op, context.rank, 0.5), group=group, async_op=True).wait()
            assert_same(x, expected)


@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS + PREMUL, ids=names(REDUCTIONS + PREMUL))
@pytest.mark.parametrize("size", [2, 4])
def test_all_reduce(ranks, size, op, dtype):
    ranks(size).run(all_reduce, op, dtype)


def shapes(context):
    for group in both(context):
        for shape in ((), (0,), (3, 0, 2), (1,), (2, 3, 4), (1000, 33)):
            x = value(context.rank, torch.float32, shape)
            dist.all_reduce(x, group=group)
            assert_same(
                x, reduced("SUM", [value(rank, torch.float32, shape) for rank in range(context.size)])
            )
        image = value(context.rank, torch.float32, (2, 3, 4, 5)).to(memory_format=torch.channels_last)
        dist.all_reduce(image, group=group)
        assert image.is_contiguous(memory_format=torch.channels_last)
        parts = [value(rank, torch.float32, (2, 3, 4, 5)) for rank in range(context.size)]
        assert_same(image, reduced("SUM", parts))


@pytest.mark.parametrize("size", [2, 4])
def test_all_reduce_takes_any_shape_and_keeps_strides(ranks, size):
    ranks(size).run(shapes)


def coalesced(context, dtype):
    shapes = [(3, 2), (), (0,), (7,)]
    for group in both(context, dtype):
        xs = [value(context.rank, dtype, shape, seed=i) for i, shape in enumerate(shapes)]
        xs[0] = layouts(context, group)[-1](xs[0])
        dist.all_reduce_coalesced(xs, group=group)
        for i, (x, shape) in enumerate(zip(xs, shapes, strict=True)):
            parts = [value(rank, dtype, shape, seed=i) for rank in range(context.size)]
            assert_same(x, reduced("SUM", parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex64])
def test_all_reduce_coalesced(ranks, dtype):
    ranks(4).run(coalesced, dtype)


def coalesced_future(context):
    for group in both(context):
        xs = [torch.full((3,), 1.0 + context.rank), torch.full((2,), 10.0)]
        future = dist.all_reduce_coalesced(xs, dist.ReduceOp.MAX, group=group, async_op=True)
        assert_all_same(future.wait(), [torch.full((3,), float(context.size)), torch.full((2,), 10.0)])
        assert_all_same(xs, future.value())


def test_asynchronous_all_reduce_coalesced_is_a_future_of_the_tensors(ranks):
    ranks(2).run(coalesced_future)


def sparse_value(rank, size, dtype):
    """Rows that no, one and several ranks have; one of them twice on a rank; on rank 0 none."""
    rows = torch.tensor([[rank, size, rank] if rank else []], dtype=torch.int64)
    entries = value(rank, dtype, (rows.shape[1], 3))
    return torch.sparse_coo_tensor(rows, entries, (size + 2, 3), check_invariants=True)


def sparse(context, dtype):
    rank, size = context.rank, context.size
    expected = reduced("SUM", [sparse_value(r, size, dtype).to_dense() for r in range(size)])
    for group in both(context):
        for x in (sparse_value(rank, size, dtype), sparse_value(rank, size, dtype).coalesce()):
            dist.all_reduce(x, group=group)
            assert x.layout is torch.sparse_coo
            assert x.coalesce().indices().tolist() == [list(range(1, size + 1))]
            assert_same(x.to_dense(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("size", [2, 4])
def test_all_reduce_of_sparse_tensors(ranks, size, dtype):
    ranks(size).run(sparse, dtype)


def sparse_at_odds(context):
    group = dist.new_group()
    op = dist.ReduceOp.AVG if context.rank else dist.ReduceOp.SUM
    with pytest.raises(UsageError, match=r"rank 0 has SUM of \[3, 3\].* rank 1 AVG of \[3, 3\]"):
        dist.all_reduce(torch.eye(3).to_sparse(), op, group=group)
    dist.destroy_process_group(group)


def test_ranks_that_reduce_sparse_tensors_differently_are_told(ranks):
    ranks(2).run(sparse_at_odds)


def meaningless(context):
    x = torch.ones(3, dtype=torch.float32)
    for bad in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        with pytest.raises((TypeError, RuntimeError)):
            dist.all_reduce(x, bad)
    with pytest.raises((TypeError, RuntimeError)):
        dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="complex"):
        dist.all_reduce(torch.ones(3, dtype=torch.complex64), dist.ReduceOp.MAX)
    dist.all_reduce(x)
    assert_same(x, torch.full((3,), float(context.size)))


def test_a_reduction_without_a_meaning_is_refused_and_the_group_goes_on(ranks):
    ranks(2).run(meaningless)


# -- reduce --------------------------------------------------------------------------------------


def reduce(context, op, dtype):
    expected = reduced(op, [value(rank, dtype) for rank in range(context.size)], factor=3.0)
    for group in both(context, gloo=with_gloo(op, dtype)):
        for dst in range(context.size):
            x = layouts(context, group)[-1](value(context.rank, dtype))
            if dst % 2:
                dist.reduce(x, dst, reduce_op(op, context.rank, 3.0), group=group)
            else:
                dist.reduce(
                    x, op=reduce_op(op, context.rank, 3.0), group=group, group_dst=dst, async_op=True
                ).wait()
            if context.rank == dst:
                assert_same(x, expected)
            elif group is not context.gloo:
                assert_same(x, value(context.rank, dtype))  # Gloo uses it for partial results


SOME = [*((op, torch.float32) for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")), *PREMUL[:1]]
SOME += [("BXOR", torch.int16), ("AVG", torch.int32), ("SUM", torch.bool), ("SUM", torch.complex64)]
SOME += [("SUM", torch.bfloat16), ("SUM", torch.uint64)]


@pytest.mark.parametrize(("op", "dtype"), SOME, ids=names(SOME))
@pytest.mark.parametrize("size", [2, 4])
def test_reduce_gives_the_result_to_one_rank(ranks, size, op, dtype):
    ranks(size).run(reduce, op, dtype)


# -- reduce_scatter ------------------------------------------------------------------------------


def reduce_scatter(context, op, dtype):
    size, rank = context.size, context.rank
    everybody = [[value(r, dtype, (2, 3), seed=part) for part in range(size)] for r in range(size)]
    expected = reduced(op, [parts[rank] for parts in everybody], factor=2.0)
    for group in both(context, gloo=with_gloo(op, dtype)):
        for layout in layouts(context, group):
            out = layout(torch.zeros(2, 3, dtype=dtype))
            inputs = [layout(part) for part in everybody[rank]]
            dist.reduce_scatter(out, inputs, reduce_op(op, rank, 2.0), group=group)
            assert_same(out, expected)
            assert_all_same(inputs, everybody[rank])
        sources = [torch.cat(everybody[rank])]
        if group is not context.gloo:
            sources.append(torch.stack(everybody[rank]))
        for source in sources:
            out = torch.zeros(2, 3, dtype=dtype)
            work = releases.reduce_scatter_single(
                out, source, reduce_op(op, rank, 2.0), group=group, async_op=True
            )
            work.wait()
            assert_same(out, expected)


@pytest.mark.parametrize(("op", "dtype"), SOME, ids=names(SOME))
@pytest.mark.parametrize("size", [2, 4])
def test_reduce_scatter(ranks, size, op, dtype):
    ranks(size).run(reduce_scatter, op, dtype)


def uneven_reduce_scatter(context):
    size, rank = context.size, context.rank
    everybody = [[value(r, torch.float32, (part, 2), seed=part) for part in range(size)] for r in range(size)]
    for group in both(context):
        out = torch.zeros(rank, 2)
        dist.reduce_scatter(out, everybody[rank], group=group)
        assert_same(out, reduced("SUM", [parts[rank] for parts in everybody]))


@pytest.mark.parametrize("size", [2, 4])
def test_reduce_scatter_of_parts_that_differ_in_size(ranks, size):
    ranks(size).run(uneven_reduce_scatter)


def deprecated_names(context):
    results = []
    for group in both(context):
        x = value(context.rank, torch.float32, (2 * context.size,))
        for function in (dist.reduce_scatter_tensor, dist._reduce_scatter_base):
            out = torch.zeros(2)
            with releases.perhaps_deprecated():
                function(out, x, group=group)
            results.append(out)
        with pytest.warns(FutureWarning):
            op = dist.reduce_op.MAX
        y = x.clone()
        dist.all_reduce(y, op, group=group)
        assert_same(y, reduced("MAX", [value(r, torch.float32, x.shape) for r in range(context.size)]))
    for result in results:
        assert_same(result, results[0])


def test_deprecated_names_of_reductions(ranks):
    ranks(2).run(deprecated_names)
