"""The default cases, and estimates of their durations."""

from __future__ import annotations

from collections.abc import Sequence

from .case import ITEMSIZE, OPERATIONS, Case, Size


def _sizes(text: str) -> list[Size]:
    return [Size.parse(part) for part in text.split(",")]


#: sizes for all_reduce, the most important operation, and for the others
_SWEEP = _sizes("8,1K,16K,64K,256K,1M,1M+4,1M@1,16M,25M,64M,256M")
_HALF = _sizes("8,64K,1M,25M,64M")
_OTHERS = _sizes("8,64K,1M,1M+4@1,16M,64M")
_OTHERS_HALF = _sizes("64K,1M,16M")
_QUICK = _sizes("8,64K,1M+4@1,16M")

RANKS = (2, 4)
ROUNDS = 11
QUICK_ROUNDS = 3


def cases(
    operations: Sequence[str] = OPERATIONS,
    dtypes: Sequence[str] = tuple(ITEMSIZE),
    sizes: Sequence[Size] = (),
    *,
    quick: bool = False,
) -> list[Case]:
    """The cases, in order of size within each operation and dtype.

    Args:
        operations, dtypes: the operations and dtypes to measure.
        sizes: sizes for all of them; empty means the defaults of each operation.
        quick: use few default sizes.
    """
    found: list[Case] = []
    for operation in operations:
        if operation == "barrier":
            found.append(Case("barrier", "fp32", Size(0)))
            continue
        for dtype in dtypes:
            if sizes or quick:
                chosen: Sequence[Size] = sizes or _QUICK
            elif operation == "all_reduce":
                chosen = _SWEEP if dtype == "fp32" else _HALF
            else:
                chosen = _OTHERS if dtype == "fp32" else _OTHERS_HALF
            found += [Case(operation, dtype, size) for size in sorted(set(chosen))]
    return found


def seconds(case: Case, ranks: int, variants: int, rounds: int) -> float:
    """Estimate the duration of a case in seconds, from runs on a machine with two cores."""
    turn = 0.02 + 0.005 * ranks + case.memory(ranks) / 1.5e9
    return variants * (rounds + 4) * turn
