"""The corners of arithmetic that the matrix of random values does not reach."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.group import ProcessGroup
from shoal.spec import ReduceOp

from .reference import identical
from .worlds import TOPOLOGIES, Worlds, topology_options

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


def test_a_nan_is_the_same_bits_everywhere(worlds: Worlds) -> None:
    def collective(group: ProcessGroup) -> torch.Tensor:
        payload = torch.tensor([0x7FC00001 + group.rank, -1], dtype=torch.int32).view(torch.float32)
        return group.all_reduce(payload.clone()).wait()

    results = worlds(SIZE).run(collective)
    assert all(identical(x, results[0]) for x in results)
