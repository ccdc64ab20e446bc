"""The corners of arithmetic that the matrix of random values does not reach."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.errors import CollectiveMismatch, GroupClosed, UsageError
from shoal.group import ProcessGroup
from shoal.spec import ReduceOp
from shoal.testing.conformance.reference import data, identical
from tests.support.topologies import TOPOLOGIES, topology_options

from .worlds import Worlds

SIZE = 3


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_min_and_max_propagate_nan_and_know_infinity(
    worlds: Worlds, topology: str, dtype: torch.dtype
) -> None:
    rows = torch.tensor(
        [[math.nan, 1.0, math.inf, -math.inf], [2.0, math.nan, -5.0, 7.0], [3.0, 4.0, 6.0, math.inf]],
        dtype=dtype,
    )

    def collective(group: ProcessGroup) -> None:
        low, high = (group.all_reduce(rows[group.rank].clone(), op).wait() for op in ("min", "max"))
        assert low.isnan().tolist() == high.isnan().tolist() == [True, True, False, False]
        assert low[2:].tolist() == [-5.0, -math.inf]
        assert high[2:].tolist() == [math.inf, math.inf]

    worlds(SIZE, **topology_options(topology, SIZE)).run(collective)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_short_floats_are_rounded_once(worlds: Worlds, topology: str) -> None:
    # Rounded after each addition, 2048 + 1 + 1 in float16 stays 2048; rounded once it is 2050.
    def collective(group: ProcessGroup) -> None:
        for dtype, large in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
            x = torch.tensor([large if group.rank == 0 else 1.0] * 5, dtype=dtype)
            out = torch.empty(5, dtype=dtype)
            group.reduce_scatter(out, [x] * SIZE).wait()
            group.all_reduce(x).wait()
            assert x.tolist() == out.tolist() == [large + 2] * 5
            # The sum overflows float16, the average does not.
            huge = torch.full((5,), 60000.0).to(dtype)
            assert group.all_reduce(huge.clone(), "avg").wait().tolist() == huge.tolist()

    worlds(SIZE, **topology_options(topology, SIZE)).run(collective)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_integers_wrap_and_averages_truncate_toward_zero(worlds: Worlds, topology: str) -> None:
    def collective(group: ProcessGroup) -> None:
        def of(op: str, dtype: torch.dtype, *values: int) -> list[int]:
            x = torch.tensor([values[group.rank]], dtype=dtype)
            return group.all_reduce(x, op).wait().tolist()

        assert of("sum", torch.int8, 100, 100, 100) == [44]
        assert of("product", torch.uint8, 16, 16, 3) == [0]
        assert of("avg", torch.int8, 100, 100, 101) == [100]
        assert of("avg", torch.int32, -5, -2, -1) == [-2]
        assert of("avg", torch.int64, 5, 2, 1) == [2]
        assert of("max", torch.uint16, 65535, 1, 2) == [65535]
        assert of("min", torch.uint32, 2**32 - 1, 2**31, 2**31 + 1) == [2**31]
        assert of("max", torch.uint64, 2**64 - 1, 0, 2**63) == [2**64 - 1]
        assert of("sum", torch.int64, 2**62, 2**62, 0) == [-(2**63)]

    worlds(SIZE, **topology_options(topology, SIZE)).run(collective)


def test_any_true_byte_of_a_bool_is_true(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> None:
        odd = torch.tensor([2, 0, 255, 0], dtype=torch.uint8).view(torch.bool)
        for op, expected in (("sum", [1, 0, 1, 0]), ("product", [1, 0, 1, 0]), ("bxor", [1, 0, 1, 0])):
            x = group.all_reduce(odd.clone(), op).wait()
            assert x.view(torch.uint8).tolist() == expected

    worlds(SIZE).run(collective)


def test_a_factor_is_applied_before_the_sum(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> None:
        x = torch.tensor([32768.0], dtype=torch.float16)
        assert group.all_reduce(x, ReduceOp.premul_sum(0.5)).wait().item() == 49152.0
        z = torch.tensor([1 + 2j])
        assert group.all_reduce(z, ReduceOp.premul_sum(torch.tensor(2.0))).wait().item() == 6 + 12j

    worlds(SIZE).run(collective)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64], ids=str
)
def test_each_rank_multiplies_what_it_gives_by_its_own_factor(
    worlds: Worlds, topology: str, dtype: torch.dtype
) -> None:
    count = 300_000  # more than is reduced in one step, and enough for the group's memory
    factors = [0.3, -1.7, 1e-3]
    given = [data(dtype, count, rank).clone() for rank in range(SIZE)]
    products = [x * factor for x, factor in zip(given, factors, strict=True)]

    def collective(group: ProcessGroup) -> torch.Tensor:
        rank, op = group.rank, ReduceOp.premul_sum(factors[group.rank])
        mine = given[rank].clone()
        all_reduced = group.all_reduce(mine.clone(), op).wait()
        registered = group.empty(count, dtype=dtype).copy_(mine)
        assert identical(group.all_reduce(registered, op).wait(), all_reduced)
        strided = torch.stack([mine, mine], 1)[:, 0]
        assert identical(group.all_reduce(strided, op).wait(), all_reduced)
        leaf = mine.clone().requires_grad_()
        with torch.no_grad():
            assert identical(group.all_reduce(leaf, op).wait(), all_reduced)
        x = mine.clone()
        reduced = group.reduce(x, 1, op).wait()
        assert (reduced is None) == (rank != 1)
        assert identical(x, mine if rank != 1 else all_reduced)
        third = count // SIZE
        own = all_reduced[rank * third : (rank + 1) * third]
        part = torch.empty(third, dtype=dtype)
        assert identical(group.reduce_scatter_single(part, mine, op).wait(), own)
        assert identical(group.reduce_scatter(part, list(mine.split(third)), op).wait(), own)
        assert identical(mine, given[rank])  # which was only read
        inside = list(mine.split(third))
        assert identical(group.reduce_scatter(inside[rank], inside, op).wait(), own)
        return all_reduced

    results = worlds(SIZE, **topology_options(topology, SIZE)).run(collective)
    assert all(identical(result, results[0]) for result in results)
    # As a sum of products that were rounded before.
    sums = worlds(SIZE, **topology_options(topology, SIZE)).run(
        lambda group: group.all_reduce(products[group.rank].clone()).wait()
    )
    assert identical(results[0], sums[0])


def test_factors_are_numbers_as_any(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> None:
        first = group.rank == 0

        def total(factor: float, *values: complex, dtype: torch.dtype = torch.float32) -> list[complex]:
            op = ReduceOp.premul_sum(factor if first else 1)
            return group.all_reduce(torch.tensor(values, dtype=dtype), op).wait().tolist()

        assert total(-2, 1.0, 3.0) == [0.0, 0.0]
        assert total(math.inf, 1.0, -1.0) == [math.inf, -math.inf]
        assert all(math.isnan(x) for x in total(math.nan, 1.0))
        # A factor in float16 would be infinite, and a complex one would make NaN of infinite parts.
        assert total(1e5, 2**-10, dtype=torch.float16)[0] == pytest.approx(1e5 * 2**-10 + 2**-9, rel=1e-3)
        assert total(3, complex(math.inf, 1), dtype=torch.complex64) == [complex(math.inf, 5)]
        with torch.inference_mode():
            x = torch.ones(3)
        assert group.all_reduce(x, ReduceOp.premul_sum(group.rank)).wait().tolist() == [3.0] * 3

    worlds(SIZE).run(collective)


def test_a_sum_beside_a_sum_of_products_is_a_mismatch(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> None:
        doomed = group.subgroup(range(SIZE), name="doomed")
        op = ReduceOp.premul_sum(group.rank) if group.rank else ReduceOp.SUM
        with pytest.raises(CollectiveMismatch, match="op=SUM") as caught:
            doomed.all_reduce(torch.ones(4), op).wait()
        assert "op=PREMUL_SUM" in str(caught.value)
        doomed.close()

    worlds(SIZE).run(collective)


def test_nothing_is_multiplied_for_a_call_that_is_refused(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> None:
        x = torch.ones(2**19)
        with pytest.raises(UsageError, match="expected a positive number of seconds"):
            group.all_reduce(x, ReduceOp.premul_sum(2), timeout=-1)
        with pytest.raises(UsageError, match=r"PREMUL_SUM has no meaning for torch\.int32"):
            group.all_reduce(x.int(), ReduceOp.premul_sum(2))
        gone = group.subgroup(range(SIZE), name="gone")
        gone.close()
        part = torch.empty(2**18)
        for call in (
            lambda op: gone.all_reduce(x, op),
            lambda op: gone.reduce(x, (group.rank + 1) % SIZE, op),
            lambda op: gone.reduce_scatter(part, [part] * SIZE, op),
        ):
            with pytest.raises(GroupClosed):
                call(ReduceOp.premul_sum(2))
        assert x.eq(1).all()
        group.barrier().wait()

    worlds(SIZE).run(collective)


def test_a_nan_is_the_same_bits_everywhere(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> torch.Tensor:
        payload = torch.tensor([0x7FC00001 + group.rank, -1], dtype=torch.int32).view(torch.float32)
        return group.all_reduce(payload.clone()).wait()

    results = worlds(SIZE).run(collective)
    assert all(identical(x, results[0]) for x in results)
