"""Which strided tensors have several elements at one address."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.group.validation import overlap
from shoal.group.validation.arguments import OperationCall
from shoal.group.validation.overlap import SearchLimitExceeded, dims_overlap, overlaps_itself

#: Strides whose sums meet only far away: every search for a meeting is long.
ENTANGLED = [(10**12 + prime**8, 9) for prime in (3, 5, 7, 11, 13, 17)]


def _sums(dims: list[tuple[int, int]]) -> list[int]:
    sums = [0]
    for stride, size in dims:
        sums = [offset + i * stride for offset in sums for i in range(size)]
    return sums


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), min_size=1, max_size=5))
@example([(6, 4), (10, 4), (15, 4)])  # no two strides without a common divisor
@example([(12, 2), (20, 3), (30, 2), (15, 2)])
def test_what_is_found_is_what_looking_at_every_address_finds(dims: list[tuple[int, int]]) -> None:
    sums = _sums(dims)
    assert (math.prod(size for _, size in dims) > 0 and dims_overlap(dims)) == (len(set(sums)) < len(sums))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=3))
def test_tensors_that_overlap_themselves_are_recognised(dims: list[tuple[int, int]]) -> None:
    strides, sizes = zip(*dims, strict=True)
    x = torch.arange(100).as_strided(sizes, strides)
    addresses = x.flatten().tolist()
    assert overlaps_itself(x) == (len(set(addresses)) < len(addresses))


@pytest.mark.parametrize(
    ("dims", "overlaps"),
    [
        ([(2, 10**8), (3, 2)], False),  # the even addresses and the odd ones
        ([(2, 10**8), (4, 2)], True),
        ([(10**9, 10**9), (10**9 + 1, 10**9)], False),
        ([(10**9, 10**9 + 2), (10**9 + 1, 10**9 + 1)], True),
        ([(7, 10**6), (7 * 10**6, 10**6), (7 * 10**11, 10**6)], True),
        ([(1, 50), (60, 10**8), (60 * 10**8 - 5, 2)], False),
    ],
)
def test_the_number_of_elements_costs_nothing(dims: list[tuple[int, int]], overlaps: bool) -> None:
    assert dims_overlap(dims, effort=100) == overlaps


def test_the_search_ends_though_it_found_nothing() -> None:
    with pytest.raises(SearchLimitExceeded):
        dims_overlap(ENTANGLED)


def test_a_large_interleaved_output_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    call = OperationCall("recv", 0, 2, frozenset({"cpu"}))
    memory = torch.empty(2 * 10**8 + 4, dtype=torch.uint8)  # nobody touches it
    call.output(memory.as_strided((10**8, 2), (2, 3)), "x")
    with pytest.raises(UsageError, match="several elements at one address"):
        call.output(memory.as_strided((10**8, 2), (2, 4)), "x")
    monkeypatch.setattr(overlap.dims_overlap, "__defaults__", (0,))
    with pytest.raises(UsageError, match=r"takes too long to find out .*; pass x\.contiguous\(\)"):
        call.output(memory.as_strided((10**8, 2), (2, 3)), "x")
