"""Training in half precision by hand, for the tests of mixed precision."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import shoal
from shoal import MixedPrecision
from tests.parallel.training import SMALL_MB

BF16 = torch.bfloat16
HALF = MixedPrecision(param_dtype=BF16)


def batches(count: int, size: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(99)
    return [
        (torch.randn(size, 6, generator=random), torch.randn(size, 3, generator=random)) for _ in range(count)
    ]


def wrap(module: nn.Module, group: shoal.ProcessGroup, precision: MixedPrecision, **options: Any) -> Any:
    options.setdefault("bucket_cap_mb", SMALL_MB)
    return shoal.DistributedDataParallel(module, group=group, mixed_precision=precision, **options)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return ((model(batch[0]).float() - batch[1]) ** 2).mean()


def by_hand(module: nn.Module, batch: Any, size: int, precision: MixedPrecision) -> list[torch.Tensor]:
    """Gradients of a model in ``param_dtype`` on each rank's part, averaged in ``reduce_dtype``."""
    gradients: list[list[torch.Tensor]] = []
    for rank in range(size):
        low = copy.deepcopy(module)
        low.zero_grad()
        low.to(precision.param_dtype)
        x, y = (tensor[rank::size] for tensor in batch)
        loss_of(low, (x.to(precision.param_dtype), y)).backward()
        gradients.append([parameter.grad for parameter in low.parameters()])
    reduce_dtype = precision.reduce_dtype or precision.param_dtype
    return [
        torch.stack(same).float().mean(0).to(reduce_dtype).float() for same in zip(*gradients, strict=True)
    ]


def assert_gradients(model: nn.Module, expected: list[torch.Tensor]) -> None:
    """The gradients of a model in full precision have these bits."""
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.dtype == torch.float32
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, gradient)
