"""Sizes are written and counted the same way for every contender."""

from __future__ import annotations

import pytest

from shoal.tools.bench.case import ITEMSIZE, OPERATIONS, Case, Size, default_cases


@pytest.mark.parametrize("text", ["8", "64K", "1M", "1M+4", "1M@1", "1M+4@1", "2G"])
def test_a_size_is_written_as_it_is_read(text: str) -> None:
    assert str(Size.parse(text)) == text


@pytest.mark.parametrize("text", ["", "1X", "-8", "1M+", "@1", "1.5M"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        Size.parse(text)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_larger_buffer_has_the_size_rounded_up_to_equal_parts(operation: str, ranks: int) -> None:
    for dtype, itemsize in ITEMSIZE.items():
        for nbytes in (8, 2**20 + 4):
            largest = max(Case(operation, dtype, Size(nbytes)).elements(ranks)) * itemsize
            if operation == "barrier":
                assert largest == 0
            else:
                assert nbytes <= largest < nbytes + ranks * itemsize


def test_the_default_sweep_has_sizes_off_powers_of_two_and_odd_offsets_for_every_operation() -> None:
    cases = default_cases()
    assert len(cases) == len(set(cases))
    assert {case.operation for case in cases} == set(OPERATIONS)
    for operation in OPERATIONS[:-1]:
        sizes = {case.size for case in cases if case.operation == operation}
        assert any(size.offset for size in sizes)
        assert any(size.nbytes % 16 == 4 for size in sizes)
    all_reduce = [case.size.nbytes for case in cases if case.operation == "all_reduce"]
    assert (min(all_reduce), max(all_reduce)) == (8, 256 * 2**20)
