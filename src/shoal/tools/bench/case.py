"""The measured cases: an operation, a dtype and a size.  Imported by MPI ranks, so it has no dependencies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

OPERATIONS = (
    "all_reduce",
    "broadcast",
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "send_recv",
    "barrier",
)
REDUCTIONS = ("all_reduce", "reduce_scatter_single")
ITEMSIZE = {"fp32": 4, "bf16": 2}

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"(\d+)([KMG]?)(?:\+(\d+))?(?:@(\d+))?")

#: size in bytes from which a barrier precedes every timed call
PACED_FROM = 32 * 2**10


@dataclass(frozen=True, order=True)
class Size:
    """The size and alignment of a rank's largest buffer.

    Attributes:
        nbytes: bytes of the largest buffer.
        offset: number of elements by which every buffer is offset in its allocation.
    """

    nbytes: int
    offset: int = 0

    @classmethod
    def parse(cls, text: str) -> Size:
        """Parse ``"64K"``, ``"1M+4"`` (additional bytes) or ``"1M@1"`` (offset); raises `ValueError`."""
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a size such as 8, 64K, 1M+4 or 1M@1")
        number, unit, more, offset = match.groups()
        return cls(int(number) * _UNITS[unit] + int(more or 0), int(offset or 0))

    def __str__(self) -> str:
        """The form that :meth:`parse` reads, such as ``1M+4@1``."""
        for unit in ("G", "M", "K"):
            whole, rest = divmod(self.nbytes, _UNITS[unit])
            if whole and (rest == 0 or rest <= 64):
                text = f"{whole}{unit}" + (f"+{rest}" if rest else "")
                break
        else:
            text = str(self.nbytes)
        return text + (f"@{self.offset}" if self.offset else "")


@dataclass(frozen=True)
class Case:
    """An operation with a dtype and a size of buffers."""

    operation: str
    dtype: str
    size: Size

    @property
    def paced(self) -> bool:
        """Whether an untimed barrier precedes each call; not if the operation is small and synchronizes."""
        if self.operation == "barrier":
            return False
        return self.operation in ("broadcast", "send_recv") or self.size.nbytes >= PACED_FROM

    def elements(self, ranks: int) -> tuple[int, int]:
        """The number of elements of each rank's input and output; output 0 means in place.

        The larger one has ``size.nbytes``, rounded up to equal parts of whole elements.
        """
        if self.operation == "barrier":
            return 0, 0
        whole = max(1, self.size.nbytes // ITEMSIZE[self.dtype])
        part = -(-whole // ranks)
        parts = part * ranks
        return {
            "all_gather_single": (part, parts),
            "reduce_scatter_single": (parts, part),
            "all_to_all_single": (parts, parts),
        }.get(self.operation, (whole, 0))

    def memory(self, ranks: int) -> int:
        """Total bytes of one set of buffers on all ranks."""
        return sum(self.elements(ranks)) * ITEMSIZE[self.dtype] * ranks

    def __str__(self) -> str:
        return self.operation if self.operation == "barrier" else f"{self.operation} {self.dtype} {self.size}"


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


def default_cases(
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


def estimated_seconds(case: Case, ranks: int, variants: int, rounds: int) -> float:
    """Estimate the duration of a case in seconds, from runs on a machine with two cores."""
    turn = 0.02 + 0.005 * ranks + case.memory(ranks) / 1.5e9
    return variants * (rounds + 4) * turn
