"""The expected results of collectives, computed without a backend: in float64, and with exact integers."""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch

from ...spec import LEGAL_REDUCTIONS, ReduceOp

#: when a backend rounds sums and products of 16-bit floats to their dtype, see ``BackendConformance``
Rounding: TypeAlias = Literal["once", "per hop"]

#: the reductions by name
OPS = {
    name: ReduceOp.premul_sum(1) if name == "premul_sum" else ReduceOp.of(name)
    for name in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
}


def factor(rank: int) -> float:
    """The factor of ``rank`` in PREMUL_SUM; exact in every floating-point dtype."""
    return 0.375 * (rank - 1)


def op_of(rank: int, name: str) -> ReduceOp:
    """The reduction ``name`` as an argument of ``rank``."""
    return ReduceOp.premul_sum(factor(rank)) if name == "premul_sum" else OPS[name]


@functools.cache
def data(dtype: torch.dtype, count: int, *seed: object) -> torch.Tensor:
    """Random values of ``dtype`` on the CPU, equal for equal arguments.  Shared: clone before writing."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(repr((str(dtype), count, seed)).encode()))
    if dtype is torch.bool:
        return torch.rand(count, device="cpu", generator=generator) < 0.5
    if dtype in LEGAL_REDUCTIONS and (dtype.is_floating_point or dtype.is_complex):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        x = torch.randn(count, dtype=wide, device="cpu", generator=generator)
        if "product" in seed:  # neither overflows nor underflows, for any number of values
            scale = torch.rand(count, dtype=torch.float64, device="cpu", generator=generator)
            x = x / x.abs() * (1 + 0.3 * scale)
        return x.to(dtype)
    count_bytes = count * dtype.itemsize
    noise = torch.randint(0, 256, (count_bytes,), dtype=torch.uint8, device="cpu", generator=generator)
    x = noise.view(dtype)
    if "avg" in seed and dtype.itemsize == 8:
        return x.view(torch.int64).bitwise_right_shift(8).abs().view(dtype)  # sums fit into 64 bits
    return x


def reduced(
    parts: list[torch.Tensor], name: str, rounding: Rounding = "once"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the reduction of ``parts`` and the maximum error of a result; None: the result must be equal."""
    dtype = parts[0].dtype
    if dtype is torch.bool:
        return _of_bools(torch.stack(parts), name), None
    if not (dtype.is_floating_point or dtype.is_complex):
        return _of_integers(parts, name), None
    wide = torch.complex128 if dtype.is_complex else torch.float64
    factors = [factor(rank) if name == "premul_sum" else 1.0 for rank in range(len(parts))]
    stack = torch.stack([part.to(wide) * by for part, by in zip(parts, factors, strict=True)])
    if name in ("min", "max"):
        return (stack.amin(0) if name == "min" else stack.amax(0)).to(dtype), None
    scale = 1 / len(parts) if name == "avg" else 1.0
    exact = stack.prod(0) if name == "product" else stack.sum(0) * scale
    # Each of the n operations of the accumulator, which has float32 at least, may round; the error of each is
    # relative to the partial result, which is at most `size`.
    size = stack.abs().prod(0) if name == "product" else stack.abs().sum(0) * scale
    eps = torch.finfo(dtype).eps
    unit = 2.0**-23 if dtype.itemsize == 2 else eps
    bound = (2 if dtype.is_complex else 1) * (len(parts) + 1) * unit * size + torch.finfo(dtype).tiny
    if dtype.itemsize == 2 and rounding == "per hop":
        # Each operation rounds by at most half a unit: n - 1 of the reduction, and that with a factor.
        hops = len(parts) - 1 + (name in ("avg", "premul_sum"))
        bound = bound + ((1 + 0.5 * eps) ** hops - 1) * size
    elif dtype.itemsize == 2:
        # The result is rounded once more, by at most half a unit, and so are the products of premul_sum.
        bound = bound + 0.5 * eps * exact.abs()
        if name == "premul_sum":
            bound = bound + 0.5 * eps * size
    return exact, bound


def agree(result: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | None) -> bool:
    """Whether ``result`` is within ``bound`` of ``expected``; without a bound, whether all bits are equal."""
    if bound is None:
        return identical(result, expected)
    return bool(((result.to(expected.dtype) - expected).abs() <= bound).all())


def identical(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether dtypes, shapes and all bits are equal: NaN equals itself, and zeros have signs."""
    return x.dtype is y.dtype and x.shape == y.shape and raw(x) == raw(y)


def raw(x: torch.Tensor) -> bytes:
    """The bytes of the elements of ``x``, in order."""
    flat = torch.empty(x.numel(), dtype=x.dtype, device="cpu").copy_(x.detach().reshape(-1))
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


def _of_bools(stack: torch.Tensor, name: str) -> torch.Tensor:
    if name in ("sum", "max", "bor"):
        return stack.any(0)
    if name in ("product", "min", "band"):
        return stack.all(0)
    return stack.sum(0) % 2 == 1


def _of_integers(parts: list[torch.Tensor], name: str) -> torch.Tensor:
    dtype, size = parts[0].dtype, len(parts)
    if name == "avg":
        sums = [sum(values) for values in zip(*(part.tolist() for part in parts), strict=True)]
        means = [abs(s) // size * (1 if s >= 0 else -1) for s in sums]  # truncates
        return torch.tensor(means, dtype=dtype, device="cpu")
    # torch computes with few unsigned dtypes: the bits of sums and products are those of signed integers, and
    # the order is too once the highest bit is flipped.
    signed = _SIGNED.get(dtype, dtype)
    lowest = torch.iinfo(signed).min if signed is not dtype and name in ("min", "max") else 0
    folds: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
        "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
    }  # fmt: skip
    result = functools.reduce(folds[name], [part.view(signed) ^ lowest for part in parts])
    return (result ^ lowest).view(dtype)


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
