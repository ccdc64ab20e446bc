"""Lists of output tensors that share memory.

torch accepts ``all_gather([buffer] * n, x)``: it writes the outputs in list order, so the last one remains.
A group rejects such a list, because it writes the outputs concurrently and in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ..future import Future
from ..group.submission import map_future
from ..group.validation.arguments import has_memory
from ..group.validation.overlap import SearchLimitExceeded, overlaps_itself


def with_distinct_outputs(
    outputs: Sequence[torch.Tensor],
    operation: Callable[[Sequence[torch.Tensor]], Future[Any]],
    *,
    keep: bool = False,
) -> Future[Any]:
    """Call ``operation`` with outputs that do not share memory, as if they were written in list order.

    Outputs that share memory are replaced by temporary tensors.  These are copied back in list order when
    the returned future's completion is first observed.

    Args:
        keep: whether the operation also reads the outputs.
    """
    if not _share_memory(outputs):
        return operation(outputs)
    with torch.no_grad():
        apart = [_temporary_output(x, keep) for x in outputs]

    def copy_back(_: Any) -> list[torch.Tensor]:
        # In inference mode, leaves that require gradients and inference tensors can both be written.
        with torch.inference_mode():
            for x, y in zip(outputs, apart, strict=True):
                x.copy_(y)
        return list(outputs)

    return map_future(operation(apart), copy_back)


def _temporary_output(x: torch.Tensor, keep: bool) -> torch.Tensor:
    try:
        refused = overlaps_itself(x)
    except SearchLimitExceeded:
        refused = True
    if refused:
        return x  # the group raises a detailed error
    return x.detach().clone() if keep else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _share_memory(xs: Sequence[torch.Tensor]) -> bool:
    """Return whether two of ``xs`` may share memory; False unless all are strided tensors with memory."""
    if not isinstance(xs, (list, tuple)):
        return False  # the group raises a detailed error
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
