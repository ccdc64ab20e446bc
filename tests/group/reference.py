"""What collectives must give, computed without shoal: in float64, with exact integers, from plain tensors."""

from __future__ import annotations

import functools
import zlib

import numpy as np
import torch

from shoal.spec import LEGAL_REDUCTIONS, ReduceOp

OPS = {
    name: ReduceOp.premul_sum(1) if name == "premul_sum" else ReduceOp.of(name)
    for name in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
}


def factor(rank: int) -> float:
    """What ``rank`` multiplies by in PREMUL_SUM; exact in every float."""
    return 0.375 * (rank - 1)


def op_of(rank: int, name: str) -> ReduceOp:
    """The reduction ``name``, as ``rank`` gives it."""
    return ReduceOp.premul_sum(factor(rank)) if name == "premul_sum" else OPS[name]


@functools.cache
def data(dtype: torch.dtype, count: int, *seed: object) -> torch.Tensor:
    """Random values of ``dtype``, equal for equal arguments.  Shared: clone before writing."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr((str(dtype), count, seed)).encode()))
    if dtype is torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    if dtype in LEGAL_REDUCTIONS and (dtype.is_floating_point or dtype.is_complex):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        x = torch.randn(count, dtype=wide, generator=generator)
        if "product" in seed:  # of any number of values, neither over- nor underflowing
            x = x / x.abs() * (1 + 0.3 * torch.rand(count, dtype=torch.float64, generator=generator))
        return x.to(dtype)
    noise = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    x = noise.view(dtype)
    if "avg" in seed and dtype.itemsize == 8:
        return x.view(torch.int64).bitwise_right_shift(8).abs().view(dtype)  # sums fit into 64 bits
    return x


def reduced(parts: list[torch.Tensor], name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the reduction of ``parts`` must give, and how far a result may be off; None: not at all."""
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
    # Each of the n operations of the accumulator, which is float32 at least, may round; how much it
    # rounds grows with the partial results.  16-bit results round once more, by half a unit at most.
    size = stack.abs().prod(0) if name == "product" else stack.abs().sum(0) * scale
    eps = torch.finfo(dtype).eps
    unit = 2.0**-23 if dtype.itemsize == 2 else eps
    bound = (2 if dtype.is_complex else 1) * (len(parts) + 1) * unit * size + torch.finfo(dtype).tiny
    if dtype.itemsize == 2:
        bound = bound + 0.5 * eps * exact.abs()
        if name == "premul_sum":  # and so do the products
            bound = bound + 0.5 * eps * size
    return exact, bound


def agree(result: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | None) -> bool:
    """Whether ``result`` is ``expected``, to the last bit if there is no bound."""
    if bound is None:
        return identical(result, expected)
    return bool(((result.to(expected.dtype) - expected).abs() <= bound).all())


def identical(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equal to the last bit: NaN equals itself, and zeros have signs."""
    return x.dtype is y.dtype and x.shape == y.shape and raw(x) == raw(y)


def raw(x: torch.Tensor) -> bytes:
    """The bytes of the elements of ``x``, in order."""
    # A single element may have any stride and count as contiguous, but not be viewed as bytes.
    flat = torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def _of_bools(stack: torch.Tensor, name: str) -> torch.Tensor:
    if name in ("sum", "max", "bor"):
        return stack.any(0)
    if name in ("product", "min", "band"):
        return stack.all(0)
    return stack.sum(0) % 2 == 1


def _of_integers(parts: list[torch.Tensor], name: str) -> torch.Tensor:
    arrays = [part.numpy() for part in parts]
    if name == "avg":
        sums = sum(array.astype(object) for array in arrays)
        means = [abs(int(s)) // len(parts) * (1 if s >= 0 else -1) for s in sums]
        return torch.from_numpy(np.array(means, dtype=arrays[0].dtype))
    fold = {
        "sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum,
        "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
    }[name]  # fmt: skip
    return torch.from_numpy(functools.reduce(fold, arrays))
