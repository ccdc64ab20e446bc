"""A measured case: an operation, a dtype and a size.  Ranks of MPI import this: it needs nothing else."""

from __future__ import annotations

import re
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

#: From this size on a barrier goes before every timed call.
PACED_FROM = 32 * 2**10


@dataclass(frozen=True, order=True)
class Size:
    """How large the largest buffer of a rank is, and where it starts.

    Attributes:
        nbytes: bytes of the largest buffer.
        offset: every buffer is a view that starts this many elements into its allocation.
    """

    nbytes: int
    offset: int = 0

    @classmethod
    def parse(cls, text: str) -> Size:
        """``"64K"``, ``"1M+4"`` (bytes on top) or ``"1M@1"`` (elements into the allocation).

        Raises:
            ValueError: it is none of these.
        """
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is no size such as 8, 64K, 1M+4 or 1M@1")
        number, unit, more, offset = match.groups()
        return cls(int(number) * _UNITS[unit] + int(more or 0), int(offset or 0))

    def __str__(self) -> str:
        """As :meth:`parse` reads it: ``1M+4@1``."""
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
    """One operation on one kind of buffers."""

    operation: str
    dtype: str
    size: Size

    @property
    def paced(self) -> bool:
        """Whether all ranks meet in a barrier, untimed, before each call.

        Operations that wait for all ranks anyway are not paced where a barrier would cost more than they.
        """
        if self.operation == "barrier":
            return False
        return self.operation in ("broadcast", "send_recv") or self.size.nbytes >= PACED_FROM

    def elements(self, ranks: int) -> tuple[int, int]:
        """How many elements the input and the output of each rank have; 0 outputs: in place.

        ``size.nbytes`` is what the larger of them has, rounded up to whole and equal parts.
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
        """Bytes that all ranks together need for one set of buffers."""
        return sum(self.elements(ranks)) * ITEMSIZE[self.dtype] * ranks

    def __str__(self) -> str:
        return self.operation if self.operation == "barrier" else f"{self.operation} {self.dtype} {self.size}"
