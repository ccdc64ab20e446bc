"""Other precisions than single."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .case import Options, case
from .dense import OnVectors, perceptron


class _Mixed(nn.Module):
    """Neighbours never share a dtype."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for dtype in dtypes * 2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x.to(layer.weight.dtype))).to(x.dtype)
        return self.head(x)


@case
class MixedDtypes(OnVectors):
    same_bits = False
    lr = 0.01
    options = Options(bucket_cap_mb=0.0005)

    def build(self) -> nn.Module:
        return _Mixed()


@case
class DoublePrecision(OnVectors):
    sizes = (2,)

    def build(self) -> nn.Module:
        return perceptron().double()

    def batch(self, random: torch.Generator) -> Any:
        return tuple(part.double() for part in super().batch(random))


@case
class Autocast(OnVectors):
    """Parameters in float32, products in bfloat16."""

    sizes = (2,)

    def build(self) -> nn.Module:
        return perceptron(depth=4)

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        inputs, targets = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(inputs)
        return ((outputs.to(targets.dtype) - targets) ** 2).mean()


@case
class PlainHook(OnVectors):
    """The hook that does what is done without one."""

    sizes = (2,)
    options = Options(bucket_cap_mb=0.004)
    hook = "allreduce_hook"

    def build(self) -> nn.Module:
        return perceptron(depth=4)


@case
class HalfPrecisionHook(PlainHook):
    """Gradients travel in float16.  With Gloo torch refuses the hook that sends them in bfloat16."""

    sizes = (2, 4)
    hook = "fp16_compress_hook"
    same_bits = False
