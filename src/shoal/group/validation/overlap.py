"""Detection of tensors that share memory, and of tensors whose elements share memory.

Two elements of a strided tensor share an address if there are steps ``d`` in its dimensions, not all 0 and
each shorter than its dimension, with ``sum(d * stride) == 0``.  This is hard in general (subset sum), but
easy for tensors that occur in practice.  As in NumPy's ``solve_may_have_internal_overlap``, the search is
exact within a bound on its steps; their number depends on the strides, not on the number of elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

#: Maximum number of steps of the search, which take some 10 ms.
MAX_EFFORT = 20_000


class SearchLimitExceeded(Exception):
    """The search for an overlap reached its bound."""


def overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two elements of the dense tensor ``x`` share an address.

    Raises:
        SearchLimitExceeded: the search reached its bound.
    """
    return x.numel() > 0 and dims_overlap(zip(x.stride(), x.shape, strict=True))


def dims_overlap(dims: Iterable[tuple[int, int]], effort: int = MAX_EFFORT) -> bool:
    """Whether two sums of ``i * stride``, ``0 <= i < size``, over the pairs in ``dims`` are equal."""
    large_first = sorted((dim for dim in dims if dim[1] > 1), reverse=True)
    strides = [stride for stride, _ in large_first]
    reaches = [size - 1 for _, size in large_first]
    if 0 in strides:
        return True
    extents = [0] * (len(strides) + 1)  # of each dimension and the smaller ones
    divisors = [0] * (len(strides) + 1)
    for i in reversed(range(len(strides))):
        extents[i] = extents[i + 1] + strides[i] * reaches[i]
        divisors[i] = math.gcd(divisors[i + 1], strides[i])
    if all(stride > extent for stride, extent in zip(strides, extents[1:], strict=True)):
        return False
    if math.prod(reach + 1 for reach in reaches) > extents[0] // divisors[0] + 1:
        return True  # more elements than addresses

    def search(i: int, offset: int, moved: bool) -> bool:
        """Whether steps in the dimensions from ``i`` on lead back from ``offset``."""
        nonlocal effort
        effort -= 1
        if effort < 0:
            raise SearchLimitExceeded
        if offset % divisors[i] if divisors[i] else offset:
            return False
        if i + 2 == len(strides):
            return _two_lead_back(strides[i:], reaches[i:], offset, moved)
        stride, rest = strides[i], extents[i + 1]
        # One of two opposite directions suffices: as long as all steps are 0, only go forward.
        first = max(-reaches[i] if moved else 0, -((offset + rest) // stride))
        last = min(reaches[i], (rest - offset) // stride)
        return any(search(i + 1, offset + d * stride, moved or d != 0) for d in range(first, last + 1))

    return search(0, 0, False)


def _two_lead_back(strides: Sequence[int], reaches: Sequence[int], offset: int, moved: bool) -> bool:
    """Whether ``offset + a * strides[0] + b * strides[1] == 0`` within reach, and not all steps are 0."""
    divisor = math.gcd(*strides)
    large, small = strides[0] // divisor, strides[1] // divisor
    if not moved:
        return small <= reaches[0] and large <= reaches[1]
    goal = -offset // divisor
    span = small * reaches[1]
    first = max(-reaches[0], -((span - goal) // large))
    last = min(reaches[0], (goal + span) // large)
    # a is known modulo `small`; b follows from it, and is within reach between `first` and `last`.
    return first + (goal * pow(large, -1, small) - first) % small <= last


def share_memory(xs: Iterable[torch.Tensor], ys: Iterable[torch.Tensor]) -> bool:
    """Whether some contiguous tensor of ``xs`` and one of ``ys`` have bytes in common."""
    spans = [_span(y) for y in ys]
    return any(low < end and start < high for low, high in map(_span, xs) for start, end in spans)


def overlapping_pair(xs: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return the indices of two contiguous tensors of ``xs`` that have bytes in common, or None."""
    # Only contiguous tensors fill their span.  Others are staged in separate memory, and interleaved columns
    # of one matrix are valid outputs.
    spans = sorted((*_span(x), i) for i, x in enumerate(xs) if x.is_contiguous() and x.numel())
    for (_, end, i), (start, _, j) in pairwise(spans):
        if start < end:
            return (min(i, j), max(i, j))
    return None


def _span(x: torch.Tensor) -> tuple[int, int]:
    start = x.data_ptr()
    return start, start + x.numel() * x.element_size()
