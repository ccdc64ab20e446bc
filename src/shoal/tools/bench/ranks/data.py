"""Contents of the buffers, and checks of the results.

Each input repeats a block of a prime number of elements that differs between ranks, so misplaced and missing
parts are detected. In fp32 the elements are small integers with exact sums. In bf16 they are in [1, 2), and
sums are compared with the exact ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..case import REDUCTIONS, Case
from .engine import Values

PERIOD = 65521

_Block = npt.NDArray[np.float64]


class WrongResult(Exception):
    """A contender computed a wrong result."""


def block(dtype: str, rank: int) -> _Block:
    """The values that the input of ``rank`` repeats."""
    mixed = (np.arange(PERIOD) * 7919 + rank * 104729) % PERIOD
    values = mixed % 251 + 1 + rank if dtype == "fp32" else 1 + mixed % 128 / 128
    return values.astype(np.float64)


def encode(values: _Block, dtype: str) -> Values:
    """Convert values that the dtype represents exactly to their storage form."""
    single = values.astype(np.float32)
    return single if dtype == "fp32" else (single.view(np.uint32) >> 16).astype(np.uint16)


def decode(stored: Values) -> _Block:
    """Convert stored elements to numbers."""
    if stored.dtype == np.uint16:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)


def fill(target: Values, dtype: str, rank: int) -> None:
    stored = encode(block(dtype, rank), dtype)
    for at in range(0, len(target), PERIOD):
        piece = target[at : at + PERIOD]
        piece[:] = stored[: len(piece)]


def check(case: Case, rank: int, ranks: int, x: Values, out: Values) -> float:
    """Return the largest relative error; raises `WrongResult` if it exceeds rounding."""
    inexact = case.operation in REDUCTIONS and case.dtype == "bf16"
    tolerance = ranks * 2.0**-8 if inexact else 0.0
    largest = 0.0
    for part, first, exact in _expected(case, rank, ranks, x, out):
        wanted = np.roll(exact, -(first % PERIOD))
        for at in range(0, len(part), PERIOD):
            piece = part[at : at + PERIOD]
            error = float(np.max(np.abs(decode(piece) / wanted[: len(piece)] - 1), initial=0))
            if not error <= tolerance:
                raise WrongResult(f"rank {rank}: wrong result, relative error {error:.2g}")
            largest = max(largest, error)
    return largest


def _expected(
    case: Case, rank: int, ranks: int, x: Values, out: Values
) -> Iterator[tuple[Values, int, _Block]]:
    """Yield parts of the result, their positions in the input, and the blocks that they repeat."""
    blocks = [block(case.dtype, r) for r in range(ranks)]
    total: _Block = np.sum(blocks, axis=0)
    if case.operation == "all_reduce":
        yield x, 0, total
    elif case.operation == "broadcast" or (case.operation == "send_recv" and rank < 2):
        yield x, 0, blocks[0]
    elif case.operation == "reduce_scatter_single":
        yield out, rank * len(out), total
    elif case.operation in ("all_gather_single", "all_to_all_single"):
        length = len(out) // ranks
        begin = rank * length if case.operation == "all_to_all_single" else 0
        for r in range(ranks):
            yield out[r * length : (r + 1) * length], begin, blocks[r]
