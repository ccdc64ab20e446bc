"""broadcast, gather, scatter, all_gather, all_to_all: every dtype and shape, beside Gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shoal import UsageError

from ..support import releases
from .both import both, layouts
from .values import COMPLEX, DTYPES, NOT_WITH_GLOO, assert_all_same, assert_same, spread, value

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
by_size = pytest.mark.parametrize("size", [2, 4])
#: of equal tensors, the last one without elements
SHAPES = [(3, 5), (), (2, 0)]


# -- broadcast, gather, scatter ------------------------------------------------------------------


def broadcast(context, dtype):
    for group in both(context, dtype):
        for src in range(context.size):
            for shape in SHAPES:
                for layout in layouts(context, group):
                    x = layout(value(context.rank, dtype, shape))
                    dist.broadcast(x, src, group=group)
                    assert_same(x, value(src, dtype, shape))
                    x = layout(value(context.rank, dtype, shape))
                    dist.broadcast(x, group=group, group_src=src, async_op=True).wait()
                    assert_same(x, value(src, dtype, shape))


@by_dtype
@by_size
def test_broadcast(ranks, size, dtype):
    ranks(size).run(broadcast, dtype)


def gather(context, dtype):
    for group in both(context, dtype, gloo=dtype not in COMPLEX):
        for dst in range(context.size):
            for shape in SHAPES:
                for layout in layouts(context, group):
                    here = context.rank == dst
                    outs = (
                        [layout(torch.zeros(shape).to(dtype)) for _ in range(context.size)] if here else None
                    )
                    x = layout(value(context.rank, dtype, shape))
                    if dst % 2:
                        dist.gather(x, outs, dst, group=group)
                    else:
                        dist.gather(x, outs, group_dst=dst, group=group, async_op=True).wait()
                    if here:
                        assert_all_same(outs, [value(rank, dtype, shape) for rank in range(context.size)])


@by_dtype
@by_size
def test_gather(ranks, size, dtype):
    ranks(size).run(gather, dtype)


def scatter(context, dtype):
    for group in both(context, dtype):
        for src in range(context.size):
            for shape in SHAPES:
                for layout in layouts(context, group):
                    here = context.rank == src
                    parts = [layout(value(rank, dtype, shape, seed=src)) for rank in range(context.size)]
                    out = layout(torch.zeros(shape).to(dtype))
                    if src % 2:
                        dist.scatter(out, parts if here else None, src, group=group)
                    else:
                        work = dist.scatter(
                            out, parts if here else None, group_src=src, group=group, async_op=True
                        )
                        work.wait()
                    assert_same(out, value(context.rank, dtype, shape, seed=src))


@by_dtype
@by_size
def test_scatter(ranks, size, dtype):
    ranks(size).run(scatter, dtype)


def uneven_gather_and_scatter(context):
    size, rank = context.size, context.rank
    parts = [value(r, torch.float32, (r, 2)) for r in range(size)]
    outs = [torch.zeros(r, 2) for r in range(size)] if rank == 1 else None
    dist.gather(parts[rank], outs, 1)
    if rank == 1:
        assert_all_same(outs, parts)
    out = torch.zeros(rank, 2)
    dist.scatter(out, parts if rank == 1 else None, 1)
    assert_same(out, parts[rank])


@by_size
def test_gather_and_scatter_of_parts_that_differ_in_size(ranks, size):
    ranks(size).run(uneven_gather_and_scatter)


# -- all_gather ----------------------------------------------------------------------------------


def all_gather(context, dtype):
    size, rank = context.size, context.rank
    for group in both(context, dtype):
        for shape in SHAPES:
            expected = [value(r, dtype, shape) for r in range(size)]
            for layout in layouts(context, group):
                outs = [layout(torch.zeros(shape).to(dtype)) for _ in range(size)]
                dist.all_gather(outs, layout(expected[rank]), group=group)
                assert_all_same(outs, expected)
            outs = [torch.zeros(shape).to(dtype) for _ in range(size)]
            dist.all_gather(outs, expected[rank], group=group, async_op=True).wait()
            assert_all_same(outs, expected)


@by_dtype
@by_size
def test_all_gather(ranks, size, dtype):
    ranks(size).run(all_gather, dtype)


def uneven_all_gather(context, dtype, layout):
    size, rank = context.size, context.rank
    expected = [value(r, dtype, (r, 3)) for r in range(size)]
    outs = [layout(torch.zeros(r, 3).to(dtype)) for r in range(size)]
    dist.all_gather(outs, layout(expected[rank]))
    assert_all_same(outs, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float8_e5m2])
@pytest.mark.parametrize("layout", [torch.clone, spread], ids=["contiguous", "strided"])
@by_size
def test_all_gather_of_tensors_that_differ_in_size(ranks, size, dtype, layout):
    ranks(size).run(uneven_all_gather, dtype, layout)


def all_gather_views(context):
    """The outputs are columns of one matrix, the input is one of them."""
    size, rank = context.size, context.rank
    matrix = torch.zeros(5, size)
    columns = list(matrix.unbind(1))
    columns[rank].copy_(value(rank, torch.float32, (5,)))
    dist.all_gather(columns, columns[rank])
    assert_same(matrix, torch.stack([value(r, torch.float32, (5,)) for r in range(size)], dim=1))


@by_size
def test_all_gather_into_columns_of_a_matrix_that_holds_the_input(ranks, size):
    ranks(size).run(all_gather_views)


def all_gather_single(context, dtype):
    size, rank = context.size, context.rank
    parts = [value(r, dtype, (2, 3)) for r in range(size)]
    joined = torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)
    for group in both(context, dtype):
        for asynchronously in (False, True):
            out = torch.zeros(2 * size, 3).to(dtype)
            work = releases.all_gather_single(out, parts[rank], group=group, async_op=asynchronously)
            if asynchronously:
                work.wait()
            assert_same(out, joined)
        out = joined.clone()
        releases.all_gather_single(out, out[2 * rank : 2 * rank + 2], group=group)  # in place
        assert_same(out, joined)
        if group is context.gloo:
            continue
        out = torch.zeros(size, 2, 3).to(dtype)
        releases.all_gather_single(out, parts[rank], group=group)
        assert_same(out, joined.view(size, 2, 3))
        out = torch.zeros(6 * size).to(dtype)
        releases.all_gather_single(out, parts[rank], group=group)
        assert_same(out, joined.flatten())
        wide = torch.zeros(2 * size, 6).to(dtype)
        releases.all_gather_single(wide[:, ::2], spread(parts[rank]), group=group)
        assert_same(wide[:, ::2], joined)


@by_dtype
@by_size
def test_all_gather_single_concatenated_and_stacked(ranks, size, dtype):
    ranks(size).run(all_gather_single, dtype)


def all_gather_of_scalars(context):
    size, rank = context.size, context.rank
    expected = torch.arange(size, dtype=torch.float32)
    out = torch.zeros(size)
    releases.all_gather_single(out, torch.tensor(float(rank)))
    assert_same(out, expected)
    out = torch.zeros(0, 3)
    releases.all_gather_single(out, torch.zeros(0, 3))


def test_all_gather_single_of_scalars_and_of_nothing(ranks):
    ranks(4).run(all_gather_of_scalars)


def all_gather_coalesced(context, dtype):
    size, rank = context.size, context.rank
    shapes = [(3, 2), (4,), (0,)]
    parts = [[value(r, dtype, shape, seed=i) for i, shape in enumerate(shapes)] for r in range(size)]
    for group in both(context, dtype):
        for asynchronously in (False, True):
            outs = [[torch.zeros(shape).to(dtype) for shape in shapes] for _ in range(size)]
            future = dist.all_gather_coalesced(outs, parts[rank], group=group, async_op=asynchronously)
            if asynchronously:
                future.wait()
            for mine, theirs in zip(outs, parts, strict=True):
                assert_all_same(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex64])
@by_size
def test_all_gather_coalesced(ranks, size, dtype):
    ranks(size).run(all_gather_coalesced, dtype)


def deprecated_names(context):
    size, rank = context.size, context.rank
    expected = torch.cat([value(r, torch.float32, (3,)) for r in range(size)])
    for group in both(context):
        for function in (dist.all_gather_into_tensor, dist._all_gather_base):
            out = torch.zeros(3 * size)
            with releases.perhaps_deprecated():
                function(out, value(rank, torch.float32, (3,)), group=group)
            assert_same(out, expected)


def test_deprecated_names_of_all_gather_single(ranks):
    ranks(2).run(deprecated_names)


# -- gather_single -------------------------------------------------------------------------------

needs_gather_single = pytest.mark.skipif(
    releases.gather_single is None, reason="this torch has no gather_single"
)


def gather_single(context, dtype):
    """The values of Gloo's gather: Gloo itself has no gather_single."""
    size, rank = context.size, context.rank
    for root in (0, size - 1):
        for shape in ((3,), (2, 3), (0,), ()):
            x = value(rank, dtype, shape)
            reference = [torch.empty_like(x) for _ in range(size)] if rank == root else None
            if dtype in NOT_WITH_GLOO or dtype in COMPLEX:
                if reference is not None:
                    reference = [value(r, dtype, shape) for r in range(size)]
            else:
                dist.gather(x, reference, root, group=context.gloo)
            stacked, flat = [size, *shape], [size * shape[0], *shape[1:]] if shape else [size]
            for asynchronous in (False, True):
                for layout in layouts(context, context.group):
                    for form in (stacked, flat):
                        out = torch.zeros(form).to(dtype) if rank == root else None
                        work = releases.gather_single(layout(x), out, root, async_op=asynchronous)
                        if asynchronous:
                            work.wait()
                        if out is not None:
                            assert_all_same(list(out.view(stacked)), reference)


@needs_gather_single
@by_dtype
@by_size
def test_gather_single(ranks, size, dtype):
    ranks(size).run(gather_single, dtype)


def wrong_outputs(context):
    size, rank = context.size, context.rank
    x = value(rank, torch.float32, (4,))
    for out in (torch.zeros(4 * size + 1), torch.zeros(4 * size - 4), torch.zeros(4 * size, 2)[:, 0]):
        # The root refuses its output before anything is sent, and may call again with another.
        if rank == 0:
            with pytest.raises(UsageError, match=rf"contiguous output of {4 * size} elements"):
                releases.gather_single(x, out, 0)
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        releases.gather_single(x, None if rank == 0 else torch.zeros(3), size)  # no such root
    out = torch.zeros(4 * size) if rank == 0 else None
    releases.gather_single(x, out, 0)
    if rank == 0:
        assert_all_same(list(out.view(size, 4)), [value(r, torch.float32, (4,)) for r in range(size)])
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size


@needs_gather_single
@by_size
def test_gather_single_refuses_a_wrong_output_and_the_group_goes_on(ranks, size):
    ranks(size).run(wrong_outputs)


# -- all_to_all ----------------------------------------------------------------------------------


def all_to_all(context, dtype):
    size, rank = context.size, context.rank
    for group in both(context, dtype):
        for shape in SHAPES:
            inputs = [value(rank, dtype, shape, seed=peer) for peer in range(size)]
            expected = [value(peer, dtype, shape, seed=rank) for peer in range(size)]
            for layout in layouts(context, group):
                outs = [layout(torch.zeros(shape).to(dtype)) for _ in range(size)]
                releases.all_to_all(outs, [layout(x) for x in inputs], group=group)
                assert_all_same(outs, expected)
            outs = [torch.zeros(shape).to(dtype) for _ in range(size)]
            releases.all_to_all(outs, inputs, group=group, async_op=True).wait()
            assert_all_same(outs, expected)


@by_dtype
@by_size
def test_all_to_all(ranks, size, dtype):
    ranks(size).run(all_to_all, dtype)


def uneven_all_to_all(context):
    size, rank = context.size, context.rank
    inputs = [value(rank, torch.float32, (rank * peer, 2), seed=peer) for peer in range(size)]
    expected = [value(peer, torch.float32, (rank * peer, 2), seed=rank) for peer in range(size)]
    outs = [torch.zeros(rank * peer, 2) for peer in range(size)]
    releases.all_to_all(outs, inputs)
    assert_all_same(outs, expected)


@by_size
def test_all_to_all_of_tensors_that_differ_in_size(ranks, size):
    ranks(size).run(uneven_all_to_all)


def all_to_all_single(context, dtype):
    size, rank = context.size, context.rank
    for group in both(context, dtype):
        # equal parts, given or not; parts of different sizes, some empty; nothing at all
        for length in (lambda r, p: 2, lambda r, p: r * p, lambda r, p: (r + 2 * p) % 3, lambda r, p: 0):
            inputs = [value(rank, dtype, (length(rank, peer), 3), seed=peer) for peer in range(size)]
            expected = [value(peer, dtype, (length(peer, rank), 3), seed=rank) for peer in range(size)]
            x, result = join(inputs), join(expected)
            splits = [[len(part) for part in expected], [len(part) for part in inputs]]
            equal = len({length(r, p) for r in range(size) for p in range(size)}) == 1
            for layout in layouts(context, group):
                for how in (splits, [None, None]) if equal else (splits,):
                    out = layout(torch.zeros(result.shape).to(dtype))
                    dist.all_to_all_single(out, layout(x), *how, group=group)
                    assert_same(out, result)
            out = torch.zeros(result.shape).to(dtype)
            dist.all_to_all_single(out, x, *splits, group=group, async_op=True).wait()
            assert_same(out, result)


def join(parts):
    """torch.cat, which does not know all dtypes."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts]).view(parts[0].dtype)


@by_dtype
@by_size
def test_all_to_all_single(ranks, size, dtype):
    ranks(size).run(all_to_all_single, dtype)


def test_the_table_of_what_gloo_refuses_is_right(ranks):
    assert ranks(2).run(refused_by_gloo) == [sorted(map(str, NOT_WITH_GLOO))] * 2


def refused_by_gloo(context):
    refused = []
    for dtype in DTYPES:
        try:
            dist.all_gather(
                [torch.zeros(2).to(dtype) for _ in range(context.size)],
                torch.zeros(2).to(dtype),
                group=context.gloo,
            )
        except RuntimeError:
            refused.append(str(dtype))
    return sorted(refused)
