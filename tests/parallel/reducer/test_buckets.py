"""Where gradients lie: the buckets that cpp/ddp/assignment chooses, and their memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal._core import BUCKET_ALIGNMENT, assign_buckets
from shoal.parallel.core import TAIL_ELEMENTS
from shoal.parallel.reducer.buckets import build_buckets
from tests.parallel.training import on_ranks

Assigned = list[tuple[list[int], list[int], int]]

parameters = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 2)), min_size=1, max_size=40)
caps = st.tuples(st.integers(0, 1000), st.integers(0, 4000))


@given(parameters, caps, st.randoms())
def test_every_parameter_lies_in_exactly_one_bucket_of_its_kind(given_, caps_, random) -> None:
    sizes, kinds = zip(*given_, strict=True)
    order = random.sample(range(len(sizes)), len(sizes))
    buckets: Assigned = assign_buckets(sizes, kinds, order, *caps_)
    assert sorted(index for members, _, _ in buckets for index in members) == list(range(len(sizes)))
    for members, offsets, nbytes in buckets:
        assert len({kinds[index] for index in members}) == 1
        assert [order.index(index) for index in members] == sorted(order.index(index) for index in members)
        assert offsets[0] == 0
        assert nbytes % BUCKET_ALIGNMENT == 0
        ends = [*offsets[1:], nbytes]
        for index, offset, end in zip(members, offsets, ends, strict=True):
            assert offset % BUCKET_ALIGNMENT == 0
            assert 0 <= end - offset - sizes[index] < BUCKET_ALIGNMENT


@given(parameters, caps, st.randoms())
def test_buckets_keep_to_their_caps_and_follow_the_expected_order(given_, caps_, random) -> None:
    sizes, kinds = zip(*given_, strict=True)
    order = random.sample(range(len(sizes)), len(sizes))
    first_cap, max_bytes = caps_
    seen: set[int] = set()
    buckets: Assigned = assign_buckets(sizes, kinds, order, first_cap, max_bytes)
    for members, _, nbytes in buckets:
        limit = max_bytes if kinds[members[0]] in seen else first_cap
        seen.add(kinds[members[0]])
        assert nbytes <= limit or len(members) == 1
    completed = [order.index(members[-1]) for members, _, _ in buckets]
    assert completed == sorted(completed)


def test_the_first_bucket_is_small_so_that_communication_starts_early() -> None:
    buckets = assign_buckets([64] * 6, [0] * 6, [5, 4, 3, 2, 1, 0], 64, 192)
    assert [members for members, _, _ in buckets] == [[5], [4, 3, 2], [1, 0]]


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 2], [0, 1, 1]])
def test_an_order_that_is_no_permutation_is_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match="permutation"):
        assign_buckets([4, 4], [0, 0], order, 100, 100)


@on_ranks(1)
def test_views_have_the_shape_and_strides_of_their_parameters(group: shoal.ProcessGroup) -> None:
    image = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    transposed = torch.empty(5, 7).t()
    with_holes = torch.empty(6, 8)[::2, ::2]
    empty = torch.empty(0, 3)
    double = torch.empty(3, dtype=torch.float64)
    given = [image, transposed, with_holes, empty, double, torch.empty(())]
    made = build_buckets(group, given, range(len(given)), 2**20)
    assert {bucket.flat.dtype for bucket in made.buckets} == {torch.float32, torch.float64}
    for parameter, view in zip(given, made.views, strict=True):
        assert view.shape == parameter.shape
        assert view.dtype == parameter.dtype
        if parameter is not with_holes:
            assert view.stride() == parameter.stride()
        view.fill_(1)  # every element has a place of its own
    assert made.tail.tolist() == [0] * TAIL_ELEMENTS
    assert sum(int((bucket.flat != 0).sum()) for bucket in made.buckets) == sum(x.numel() for x in given)
