"""Tensors that every rank can compute for all ranks, and what operations on them must give.

All values are small whole numbers, so that no result depends on the order of additions and results can be
compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTS = [
    torch.int8, torch.uint8, torch.int16, torch.uint16,
    torch.int32, torch.uint32, torch.int64, torch.uint64,
]  # fmt: skip
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
#: what can be copied; what can be reduced is all of it but FLOAT8
DTYPES = [*FLOATS, *INTS, torch.bool, *COMPLEX, *FLOAT8]

#: dtypes that Gloo refuses ("Invalid scalar type") in all collectives
NOT_WITH_GLOO = {torch.int16, torch.uint16, torch.uint32, torch.uint64, *FLOAT8}

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def legal(op: str, dtype: torch.dtype) -> bool:
    """Whether ``dist.all_reduce`` with ``op`` has a meaning for ``dtype``."""
    if op in ("BAND", "BOR", "BXOR"):
        return dtype in INTS or dtype is torch.bool
    if dtype in COMPLEX:
        return op in ("SUM", "AVG")  # torch itself refuses PRODUCT
    return op != "AVG" or dtype is not torch.bool


def with_gloo(op: str, dtype: torch.dtype) -> bool:
    """Whether Gloo can do it too."""
    if dtype in NOT_WITH_GLOO or op == "PREMUL_SUM":
        return False
    if dtype is torch.bool:
        return op != "SUM"  # it adds them as bytes: true and true is a byte that is 2
    return op != "AVG" or dtype.is_floating_point or dtype.is_complex


def value(rank: int, dtype: torch.dtype, shape: Sequence[int] = (3, 5), seed: int = 0) -> torch.Tensor:
    """The tensor of a rank: 0 to 3, or -3 to 3 where the dtype has negative numbers."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    low = 0 if not dtype.is_signed or dtype is torch.bool else -3
    numbers = torch.randint(low, 2 if dtype is torch.bool else 4, tuple(shape), generator=generator)
    if dtype.is_complex:
        imaginary = torch.randint(low, 4, tuple(shape), generator=generator)
        return torch.complex(numbers.double(), imaginary.double()).to(dtype)
    return (numbers.float() if dtype in FLOAT8 else numbers).to(dtype)


def reduced(op: str, parts: Sequence[torch.Tensor], factor: float = 1.0) -> torch.Tensor:
    """What reducing ``parts`` must give; for PREMUL_SUM rank r multiplies by r + 1 times ``factor``."""
    dtype = parts[0].dtype
    if dtype is torch.bool:
        function = {
            "SUM": torch.logical_or, "MAX": torch.logical_or, "BOR": torch.logical_or,
            "PRODUCT": torch.logical_and, "MIN": torch.logical_and, "BAND": torch.logical_and,
            "BXOR": torch.logical_xor,
        }[op]  # fmt: skip
        return reduce(function, parts)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    function = {
        "SUM": torch.add, "AVG": torch.add, "PREMUL_SUM": torch.add, "PRODUCT": torch.mul,
        "MIN": torch.minimum, "MAX": torch.maximum,
        "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
    }[op]  # fmt: skip
    factors = [factor * (r + 1) if op == "PREMUL_SUM" else 1 for r in range(len(parts))]
    result = reduce(function, [part.to(wide) * by for part, by in zip(parts, factors, strict=True)])
    if op == "AVG":
        integer = wide is torch.int64
        result = torch.div(result, len(parts), rounding_mode="trunc") if integer else result / len(parts)
    return result.to(dtype)


def reduce_op(op: str, rank: int, factor: float = 1.0) -> dist.ReduceOp:
    """torch's object for the name of a reduction, as ``rank`` gives it (see :func:`reduced`)."""
    if op == "PREMUL_SUM":
        scaled = factor * (rank + 1)
        return dist._make_nccl_premul_sum(torch.tensor([scaled]) if rank % 2 else scaled)
    return getattr(dist.ReduceOp, op)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Both tensors have the same dtype, shape and bytes."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    same = torch.equal(_bytes(actual), _bytes(expected))
    assert same, f"{actual}\nexpected\n{expected}"


def assert_all_same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Two lists of tensors are equal bit by bit."""
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def spread(x: torch.Tensor) -> torch.Tensor:
    """A non-contiguous tensor with the values of ``x``: every second element of a larger one, transposed."""
    wide = torch.zeros(*x.shape[::-1], 2, dtype=x.dtype)
    result = wide[..., 0].permute(*range(x.dim() - 1, -1, -1)) if x.dim() else wide[..., 0]
    result.copy_(x)
    return result
