"""Lists of output tensors that share memory.

torch takes ``all_gather([buffer] * n, x)``: the parts are written one after another, and the last one stays.
The operations of a group refuse such a list, because they write the parts in any order and at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ..future import Future
from ..group.submission import mapped
from ..group.validation.arguments import has_memory
from ..group.validation.overlap import TooHard, overlaps_itself


def in_turn(
    outputs: Sequence[torch.Tensor],
    operation: Callable[[Sequence[torch.Tensor]], Future[Any]],
    *,
    keep: bool = False,
) -> Future[Any]:
    """Call ``operation(outputs)`` such that it seems to write the outputs one after another.

    Outputs that share memory are replaced by tensors of their own, which are copied back in order when
    somebody sees the completion.

    Args:
        keep: whether the operation also reads the outputs.

    Returns:
        The future of the operation.
    """
    if not _share_memory(outputs):
        return operation(outputs)
    with torch.no_grad():
        apart = [_stand_in(x, keep) for x in outputs]

    def copy_back(_: Any) -> list[torch.Tensor]:
        # Inference mode allows writing to leaves that require gradients and to inference tensors alike.
        with torch.inference_mode():
            for x, y in zip(outputs, apart, strict=True):
                x.copy_(y)
        return list(outputs)

    return mapped(operation(apart), copy_back)


def _stand_in(x: torch.Tensor, keep: bool) -> torch.Tensor:
    try:
        refused = overlaps_itself(x)
    except TooHard:
        refused = True
    if refused:
        return x  # the group says why
    return x.detach().clone() if keep else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _share_memory(xs: Sequence[torch.Tensor]) -> bool:
    """Whether two of ``xs`` may have an address in common; False if they are not all tensors with memory."""
    if not isinstance(xs, (list, tuple)):
        return False  # the group refuses it in words
    spans = []
    for x in xs:
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or not has_memory(x):
            return False
        if x.numel():
            start = x.data_ptr()
            extent = sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
            spans.append((start, start + (extent + 1) * x.element_size()))
    spans.sort()
    return any(start < end for (_, end), (start, _) in pairwise(spans))
