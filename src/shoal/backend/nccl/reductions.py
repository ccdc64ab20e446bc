"""Which reductions NCCL computes, and the others in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...spec import AVG, BAND, BOR, BXOR, MAX, MIN, PREMUL_SUM, PRODUCT, SUM, ReduceOp
from .library import DTYPES, Reduction

#: the dtype of data that is copied only
BYTES = DTYPES[torch.uint8]

_REDUCTIONS = {
    SUM.code: Reduction.SUM,
    PREMUL_SUM.code: Reduction.SUM,  # the inputs are multiplied already
    AVG.code: Reduction.AVG,
    PRODUCT.code: Reduction.PRODUCT,
    MIN.code: Reduction.MIN,
    MAX.code: Reduction.MAX,
}
#: complex dtypes -> that of their parts
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_LINEAR = frozenset({SUM.code, PREMUL_SUM.code, AVG.code})
#: torch computes with few unsigned dtypes
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

_FOLDS: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    SUM.code: torch.add,
    PRODUCT.code: torch.mul,
    MIN.code: torch.minimum,
    MAX.code: torch.maximum,
    BAND.code: torch.bitwise_and,
    BOR.code: torch.bitwise_or,
    BXOR.code: torch.bitwise_xor,
}
_BOOL_FOLDS = {SUM.code: torch.bitwise_or, PRODUCT.code: torch.bitwise_and}


class NativeReduction(NamedTuple):
    """A reduction as NCCL is called for it.

    Attributes:
        dtype: code of the dtype.
        op: code of the reduction.
        width: number of elements of that dtype in an element of the tensor.
    """

    dtype: int
    op: int
    width: int = 1


@functools.cache
def _native_reduction(dtype: torch.dtype, code: int) -> NativeReduction | None:
    if dtype in _PARTS and code in _LINEAR:
        return NativeReduction(DTYPES[_PARTS[dtype]], _REDUCTIONS[code], 2)
    if dtype not in DTYPES or code not in _REDUCTIONS:
        return None
    if code == AVG.code and not dtype.is_floating_point:
        return None  # shoal's does not overflow, and truncates
    return NativeReduction(DTYPES[dtype], _REDUCTIONS[code])


def native_reduction(dtype: torch.dtype, op: ReduceOp) -> NativeReduction | None:
    """The reduction as NCCL computes it; None if it does not, or with another result."""
    return _native_reduction(dtype, op.code)


def reduce_in_torch(parts: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Reduce ``parts`` of bools, integers or complex numbers, in their order, on their device.

    Sums and products of integers wrap; averages truncate toward zero, of the exact sum up to 32 bits and of
    the wrapped one of 64.
    """
    dtype = parts[0].dtype
    if dtype is torch.bool:
        return functools.reduce(
            _BOOL_FOLDS.get(op.code) or _FOLDS[op.code], [_bits(part) for part in parts]
        ).view(dtype)
    if op.code == AVG.code and not dtype.is_complex:
        return _average(parts)
    signed = _SIGNED.get(dtype, dtype)
    if signed is dtype:
        return functools.reduce(_FOLDS[op.code], parts)
    # Sums, products and bits are those of signed integers, and so is the order if the highest bit is flipped.
    flip = torch.iinfo(signed).min if op.code in (MIN.code, MAX.code) else 0
    return (functools.reduce(_FOLDS[op.code], [part.view(signed) ^ flip for part in parts]) ^ flip).view(
        dtype
    )


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def _average(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype, size = parts[0].dtype, len(parts)
    total = functools.reduce(torch.add, [_as_int64(part) for part in parts])
    if dtype is torch.uint64:
        # Halved, it is not negative; the quotient of the half is off by one at most.
        mean = (((total >> 1) & torch.iinfo(torch.int64).max) // size) * 2
        rest = total - mean * size  # less than 2 * size
        mean = mean + rest // size
        return mean.view(dtype)
    mean = torch.div(total, size, rounding_mode="trunc")
    signed = _SIGNED.get(dtype, dtype)
    return mean.to(signed).view(dtype)


def _as_int64(x: torch.Tensor) -> torch.Tensor:
    """The values of integers as int64; those of uint64 modulo 2**64."""
    signed = _SIGNED.get(x.dtype)
    if signed is None:
        return x.to(torch.int64)
    wide = x.view(signed).to(torch.int64)
    return wide if x.dtype is torch.uint64 else wide & torch.iinfo(x.dtype).max
