"""Whom a case runs on: the backend under test, and Gloo beside it where Gloo can do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from .rank import Context
from .values import NOT_WITH_GLOO, spread

Layout = Callable[[torch.Tensor], torch.Tensor]


def both(context: Context, *dtypes: torch.dtype, gloo: bool = True) -> Iterator[dist.ProcessGroup]:
    """The groups of the same ranks: the backend's, and Gloo's unless it cannot do the case.

    Args:
        dtypes: those of the case's tensors.
        gloo: False: Gloo cannot do it for another reason.
    """
    yield context.group
    if gloo and not NOT_WITH_GLOO.intersection(dtypes):
        yield context.gloo


def layouts(context: Context, group: dist.ProcessGroup) -> list[Layout]:
    """What to make of a contiguous tensor before it is passed: Gloo gives wrong numbers with others."""
    return [torch.clone] if group is context.gloo else [torch.clone, spread]
