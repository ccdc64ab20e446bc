"""Any shape, any layout, empty or not: hypothesis looks for the one that goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.group import ProcessGroup
from shoal.testing.conformance.reference import agree, data, identical, reduced
from tests.support.topologies import TOPOLOGIES, topology_options

from .worlds import Worlds

SIZE = 3
relaxed = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64])
counts = st.lists(st.integers(0, 600), min_size=SIZE, max_size=SIZE)
topologies = st.sampled_from(TOPOLOGIES)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """A shape, a permutation of its dimensions in memory, and a step between neighbours."""
    shape = draw(shapes)
    return shape, tuple(draw(st.permutations(range(len(shape))))), draw(st.integers(1, 3))


def laid_out(layout: tuple[tuple[int, ...], tuple[int, ...], int], values: torch.Tensor) -> torch.Tensor:
    """``values`` as a tensor of that layout; what lies in between is not touched."""
    shape, order, step = layout
    memory = torch.zeros([shape[i] for i in order] + [step], dtype=values.dtype)
    inverse = [order.index(i) for i in range(len(shape))]
    return memory[..., 0].permute(inverse).copy_(values.reshape(shape))


def count_of(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


@relaxed
@given(topologies, dtypes, st.lists(layouts(), min_size=SIZE, max_size=SIZE), st.data())
def test_all_reduce_of_any_layout(
    worlds: Worlds, topology: str, dtype: torch.dtype, found: list[Any], more: st.DataObject
) -> None:
    shape = found[0][0]
    op = more.draw(st.sampled_from(["sum", "product"]))
    # The same shape everywhere, each rank with a layout of its own.
    own = [(shape, more.draw(st.permutations(range(len(shape)))), layout[2]) for layout in found]
    parts = [data(dtype, count_of(shape), rank, op) for rank in range(SIZE)]

    def collective(group: ProcessGroup) -> torch.Tensor:
        x = laid_out(own[group.rank], parts[group.rank])
        assert group.all_reduce(x, op).wait() is x
        return x

    results = worlds(SIZE, **topology_options(topology, SIZE)).run(collective)
    expected, bound = reduced(parts, op)
    for x in results:
        assert x.shape == shape
        assert agree(x.reshape(-1), expected, bound)
        assert identical(x, results[0])


@relaxed
@given(topologies, dtypes, counts, st.integers(0, SIZE - 1))
def test_uneven_parts_are_gathered_and_scattered(
    worlds: Worlds, topology: str, dtype: torch.dtype, sizes: list[int], root: int
) -> None:
    parts = [data(dtype, size, rank) for rank, size in enumerate(sizes)]

    def collective(group: ProcessGroup) -> None:
        out = [torch.empty(size, dtype=dtype) for size in sizes]
        gathered = group.all_gather(out, parts[group.rank]).wait()
        assert all(identical(x, part) for x, part in zip(gathered, parts, strict=True))
        at_root = group.gather(parts[group.rank], root=root, sizes=sizes).wait()
        assert (at_root is None) == (group.rank != root)
        assert at_root is None or all(identical(x, part) for x, part in zip(at_root, parts, strict=True))
        own = torch.empty(sizes[group.rank], dtype=dtype)
        group.scatter(own, parts if group.rank == root else None, root, sizes=sizes).wait()
        assert identical(own, parts[group.rank])

    worlds(SIZE, **topology_options(topology, SIZE)).run(collective)


@relaxed
@given(topologies, counts)
def test_uneven_parts_are_reduced(worlds: Worlds, topology: str, sizes: list[int]) -> None:
    def part(rank: int, index: int) -> torch.Tensor:
        return data(torch.float32, sizes[index], rank, index)

    def collective(group: ProcessGroup) -> torch.Tensor:
        out = torch.empty(sizes[group.rank])
        return group.reduce_scatter(out, [part(group.rank, i) for i in range(SIZE)]).wait()

    for rank, x in enumerate(worlds(SIZE, **topology_options(topology, SIZE)).run(collective)):
        assert agree(x, *reduced([part(r, rank) for r in range(SIZE)], "sum"))


@relaxed
@given(
    topologies,
    st.lists(st.lists(st.integers(0, 9), min_size=SIZE, max_size=SIZE), min_size=SIZE, max_size=SIZE),
    st.lists(st.integers(0, 4), max_size=2),
    st.booleans(),
)
def test_rows_are_exchanged_in_any_split(
    worlds: Worlds, topology: str, splits: list[list[int]], row: list[int], strided: bool
) -> None:
    def sent(rank: int) -> torch.Tensor:
        shape = (sum(splits[rank]), *row)
        x = data(torch.int32, count_of(shape), rank).reshape(shape)
        return x.T.contiguous().T if strided and x.dim() == 2 else x

    def collective(group: ProcessGroup) -> torch.Tensor:
        incoming = [splits[rank][group.rank] for rank in range(SIZE)]
        out = torch.empty(sum(incoming), *row, dtype=torch.int32)
        if strided:
            out = torch.stack([out, out], -1)[..., 0]
        return group.all_to_all_single(out, sent(group.rank), incoming, splits[group.rank]).wait()

    for rank, out in enumerate(worlds(SIZE, **topology_options(topology, SIZE)).run(collective)):
        parts = [sent(r).split(splits[r])[rank] for r in range(SIZE)]
        assert identical(out, torch.cat(parts))


@relaxed
@given(topologies, dtypes, layouts(), layouts())
def test_messages_of_any_layout(
    worlds: Worlds, topology: str, dtype: torch.dtype, source: Any, target: Any
) -> None:
    x = laid_out(source, data(dtype, count_of(source[0])))

    def exchange(group: ProcessGroup) -> None:
        right, left = (group.rank + 1) % SIZE, (group.rank - 1) % SIZE
        sent = [group.send(x, right), group.send(x, right)]
        assert identical(group.recv(None, left).wait(), x.contiguous())
        # A buffer of as many elements may have any shape of its own.
        y = laid_out((source[0], tuple(range(len(source[0]))), target[2]), torch.zeros_like(x))
        assert group.recv(y, left).wait() is y
        assert identical(y, x)
        for future in sent:
            future.wait()

    worlds(SIZE, **topology_options(topology, SIZE)).run(exchange)


def test_lazily_conjugated_and_negated_tensors_are_what_they_seem(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> None:
        z = torch.tensor([1 + 2j, 3 - 4j])
        conjugated, negated = z.clone().conj(), z.clone().conj().imag
        group.all_reduce(conjugated).wait()
        assert conjugated.tolist() == [(1 - 2j) * SIZE, (3 + 4j) * SIZE]
        group.all_reduce(negated).wait()
        assert negated.tolist() == [-2.0 * SIZE, 4.0 * SIZE]
        gathered = group.all_gather(z.conj()).wait()
        assert gathered[1].tolist() == [1 - 2j, 3 + 4j]

    worlds(SIZE).run(collective)


def test_inputs_that_overlap_outputs_are_read_before_they_are_written(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> None:
        whole = torch.arange(30.0).reshape(SIZE, 10) + 100 * group.rank
        group.all_gather_single(whole, whole[group.rank]).wait()
        assert whole[:, 0].tolist() == [0.0, 110.0, 220.0]
        x = torch.arange(3.0) + 10 * group.rank
        group.all_to_all_single(x, x).wait()
        assert x.tolist() == [group.rank + 10.0 * i for i in range(SIZE)]
        y = torch.arange(3.0)
        group.reduce_scatter_single(y[1:2], y).wait()
        assert y.tolist() == [0.0, 3.0 * group.rank, 2.0]

    worlds(SIZE).run(collective)


def test_leaves_and_inference_tensors_are_written_in_place(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> None:
        leaf = torch.ones(4, requires_grad=True)
        matrix = torch.nn.Parameter(torch.ones(3, 2))
        with torch.no_grad():
            group.all_reduce(leaf).wait()
            group.all_reduce(matrix.T).wait()
        assert leaf.tolist() == [3.0] * 4
        assert matrix.eq(3.0).all()
        assert leaf.is_leaf
        assert leaf.grad_fn is None
        with torch.inference_mode():
            x, y = torch.ones(4), torch.ones(4, 2).T
            futures = [group.all_reduce(x), group.all_reduce(y), group.all_gather(x)]
            gathered = futures[2].wait()
        assert futures[0].wait().tolist() == [3.0] * 4
        assert futures[1].wait().eq(3.0).all()
        assert len(gathered) == SIZE

    worlds(SIZE).run(collective)


@pytest.mark.parametrize("size", [1, 2])
def test_a_number_is_a_tensor_too(worlds: Worlds, size: int) -> None:
    def collective(group: ProcessGroup) -> None:
        x = torch.tensor(2.0)
        assert group.all_reduce(x).wait().item() == 2.0 * size
        assert [y.shape for y in group.all_gather(x).wait()] == [torch.Size([])] * size
        assert group.broadcast(x, size - 1).wait() is x

    worlds(size).run(collective)
