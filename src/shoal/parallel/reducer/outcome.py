"""What the ranks tell one another about a pass, besides the gradients.

Each rank says whether its pass went well, and how many forward passes it ran since the last reduction beyond
the first.  All must have run equally many: a rank that left out a backward pass would otherwise average the
gradients of one step with those of the others' next one, without any error.

There are two carriers.  Where every parameter is used, three elements at the end of the last bucket are
averaged with it (``Tail``): no message is needed.  Else, or where a communication hook decides what becomes
of a bucket, it is one small all-reduce (``Flags``), which also says which parameters were used anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...future import Future
from ...group import ProcessGroup
from ...spec import MAX

#: More are not told apart.
MOST_EXTRA = 15


class Tail:
    """Elements of the last bucket: trouble, the extra forward passes, and their square.

    The numbers of all ranks are equal exactly if the mean of the squares is the square of the mean, up to
    rounding.  All ranks see the same bits and so decide alike; in a half-precision bucket rounding may hide a
    small difference between large numbers.
    """

    def __init__(self, elements: torch.Tensor) -> None:
        self._elements = elements

    def say(self, trouble: bool, extra: int) -> None:
        """To be called before the bucket is sent; unless it is, the rank says that all is well."""
        extra = min(extra, MOST_EXTRA)
        self._elements.copy_(torch.tensor([float(trouble), extra, extra * extra]))

    def well(self) -> bool:
        """Whether the pass went well everywhere.  To be called once, after the bucket was averaged."""
        trouble, extra, square = self._elements.tolist()
        if trouble == extra == square == 0:
            return True
        self._elements.zero_()
        rounding = 4 * torch.finfo(self._elements.dtype).eps * abs(square)
        return bool(trouble == 0 and abs(extra * extra - square) <= rounding)


class Flags:
    """One all-reduce: trouble, the extra forward passes counted from both ends, and what was used."""

    def __init__(self, group: ProcessGroup, parameters: int) -> None:
        self._group = group
        self._flags = group.empty(3 + parameters, dtype=torch.uint8)
        self._future: Future[torch.Tensor] | None = None

    def say(self, trouble: bool, extra: int, used: Iterable[bool]) -> None:
        """Send.  Collective."""
        extra = min(extra, MOST_EXTRA)
        own = [trouble, extra, MOST_EXTRA - extra, *used]
        self._flags.copy_(torch.tensor(own, dtype=torch.uint8))
        self._future = self._group.all_reduce(self._flags, op=MAX)

    def hear(self) -> tuple[bool, list[bool]]:
        """Whether the pass went well everywhere, and for each parameter whether any rank used it."""
        assert self._future is not None
        trouble, most, least, *used = self._future.wait().tolist()
        self._future = None
        return not trouble and most + least == MOST_EXTRA, [bool(flag) for flag in used]
