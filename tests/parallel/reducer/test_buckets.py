"""Where gradients lie, and which buckets may be sent: the decisions of cpp/reducer, and the memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal._core import BUCKET_ALIGNMENT, assign_buckets
from shoal.parallel.core import Readiness
from shoal.parallel.reducer.buckets import TAIL, build_buckets
from shoal.testing import run_threads

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
    first_cap, cap = caps_
    seen: set[int] = set()
    buckets: Assigned = assign_buckets(sizes, kinds, order, first_cap, cap)
    for members, _, nbytes in buckets:
        limit = cap if kinds[members[0]] in seen else first_cap
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


IGNORED, ARRIVED, ATTEND, UNEXPECTED = range(4)


def test_buckets_become_ready_in_the_order_of_their_index_only() -> None:
    readiness = Readiness([[2, 3], [0], [1]], [1] * 4)
    readiness.open()
    assert readiness.mark(0) == ATTEND  # the first; bucket 1 is full but not bucket 0
    assert readiness.mark(3) == ARRIVED
    assert readiness.ready == 0
    assert readiness.mark(2) == ATTEND
    assert readiness.ready == 2
    assert readiness.mark(1) == ATTEND
    assert readiness.ready == 3
    assert readiness.arrival() == [0, 3, 2, 1]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.randoms())
def test_any_order_of_arrival_makes_all_buckets_ready(sizes, random) -> None:
    count = sum(sizes)
    shuffled = random.sample(range(count), count)
    members = [[shuffled.pop() for _ in range(size)] for size in sizes]
    expected = [random.randint(0, 3) for _ in range(count)]
    readiness = Readiness(members, expected)
    for _ in range(2):
        readiness.open()
        skipped = {index for index in range(count) if random.random() < 0.2}
        readiness.skip(sorted(skipped))
        left = [0 if index in skipped else expected[index] for index in range(count)]
        arrivals = [index for index in range(count) for _ in range(left[index])]
        random.shuffle(arrivals)
        for index in arrivals:
            before = readiness.ready
            attend = readiness.mark(index)
            left[index] -= 1
            full = [not any(left[member] for member in bucket) for bucket in members]
            assert readiness.ready <= (full.index(False) if False in full else len(full))
            assert attend == (ATTEND if readiness.ready > before or readiness.arrived == 1 else ARRIVED)
        if arrivals:
            assert readiness.ready == len(members) or not any(
                expected[member] for bucket in members[readiness.ready :] for member in bucket
            )
        assert readiness.missing() == [index for index in sorted(skipped) if expected[index]]
        assert readiness.counts() == [0 if index in skipped else expected[index] for index in range(count)]
        readiness.close()


def test_a_gradient_that_comes_twice_is_noticed_and_those_that_do_not_come_are_listed() -> None:
    readiness = Readiness([[2, 1, 0]], [1] * 3)
    readiness.open()
    assert readiness.mark(1) == ATTEND
    assert readiness.mark(1) == UNEXPECTED
    assert readiness.missing() == [0, 2]
    assert readiness.arrived == 1


def test_a_gradient_is_complete_when_it_came_as_often_as_expected() -> None:
    readiness = Readiness([[0, 1]], [2, 0])
    readiness.open()
    assert readiness.mark(0) == ATTEND
    assert readiness.ready == 0
    assert readiness.missing() == [0]
    assert readiness.mark(0) == ATTEND
    assert readiness.ready == 1
    assert readiness.mark(1) == UNEXPECTED


def test_a_skipped_gradient_that_comes_after_all_counts_until_its_bucket_is_ready() -> None:
    readiness = Readiness([[0, 1], [2]], [1] * 3)
    readiness.open()
    readiness.skip([0, 2])
    assert readiness.ready == 0
    assert readiness.mark(0) == ATTEND
    assert readiness.ready == 0
    assert readiness.mark(1) == ATTEND
    assert readiness.ready == 2
    assert readiness.mark(2) == UNEXPECTED


def test_while_learning_gradients_are_counted_and_nothing_is_ready() -> None:
    readiness = Readiness([[0], [1]], [1, 1])
    readiness.learn()
    for _ in range(2):
        readiness.open()
        assert [readiness.mark(index) for index in (0, 1, 0)] == [ATTEND, ARRIVED, ARRIVED]
        assert readiness.ready == 0
        assert readiness.counts() == [2, 1]
        assert readiness.arrival() == [1, 0]
        readiness.close()
    readiness.rebuild([[0], [1]], [2, 1])
    readiness.open()
    assert [readiness.mark(index) for index in (0, 1, 0)] == [ATTEND, ARRIVED, ATTEND]
    assert readiness.ready == 2


def test_gradients_count_only_in_a_pass_and_the_first_one_opens_an_armed_pass() -> None:
    readiness = Readiness([[1, 0]], [1, 1])
    assert readiness.mark(0) == IGNORED
    assert readiness.arrived == 0
    readiness.arm()
    assert not readiness.opened
    assert readiness.mark(0) == ATTEND
    assert readiness.opened
    readiness.close()
    assert not readiness.opened
    assert readiness.mark(0) == IGNORED  # closing disarmed it
    readiness.arm()
    readiness.disarm()
    assert readiness.mark(0) == IGNORED


def test_a_pass_without_gradients_stays_armed() -> None:
    readiness = Readiness([[0]], [1])
    readiness.arm()
    readiness.open()
    readiness.close()
    assert readiness.mark(0) == ATTEND


@pytest.mark.parametrize("buckets", [[[0], [0]], [[0, 2]], [[1]]])
def test_buckets_that_do_not_hold_every_parameter_once_are_refused(buckets: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="every parameter once"):
        Readiness(buckets, [1] * sum(map(len, buckets)))


def test_views_have_the_shape_and_strides_of_their_parameters() -> None:
    def rank(group: shoal.ProcessGroup) -> None:
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
        assert made.tail.tolist() == [0] * TAIL
        assert sum(int((bucket.flat != 0).sum()) for bucket in made.buckets) == sum(x.numel() for x in given)

    run_threads(rank, 1)
