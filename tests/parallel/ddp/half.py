"""Training in half precision by hand, for the tests of mixed precision."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import shoal
from shoal import MixedPrecision
from tests.parallel.models import loss_of, part
from tests.parallel.training import Place, wrapped

BF16 = torch.bfloat16
HALF = MixedPrecision(param_dtype=BF16)


def wrap(module: nn.Module, group: shoal.ProcessGroup, precision: MixedPrecision, **options: Any) -> Any:
    return wrapped(group, module, mixed_precision=precision, **options)


def by_hand(module: nn.Module, batch: Any, size: int, precision: MixedPrecision) -> list[torch.Tensor]:
    """Gradients of a model in ``param_dtype`` on each rank's part, averaged in ``reduce_dtype``."""
    found: list[list[torch.Tensor]] = []
    for rank in range(size):
        low = copy.deepcopy(module).to(precision.param_dtype)
        low.zero_grad()
        x, y = part(batch, Place(rank, size))
        loss_of(low, (x.to(precision.param_dtype), y)).backward()
        found.append([parameter.grad for parameter in low.parameters()])
    reduce_dtype = precision.reduce_dtype or precision.param_dtype
    return [torch.stack(same).float().mean(0).to(reduce_dtype).float() for same in zip(*found, strict=True)]
