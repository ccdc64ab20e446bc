"""Other precisions than single."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..models import Mixed
from .case import Options, case, variant
from .dense import SMALL, OnVectors

variant(
    "mixed_dtypes",
    OnVectors,
    Mixed,
    same_bits=False,
    lr=0.01,
    options=Options(bucket_cap_mb=0.0005),
    on_four=True,
)


@case
class DoublePrecision(OnVectors):
    def build(self) -> nn.Module:
        return super().build().double()

    def batch(self, random: torch.Generator) -> Any:
        return tuple(part.double() for part in super().batch(random))


@case
class Autocast(OnVectors):
    """Parameters in float32, products in bfloat16."""

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        inputs, targets = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(inputs)
        return ((outputs.to(targets.dtype) - targets) ** 2).mean()


# The hook that does what is done without one.
variant("plain_hook", OnVectors, options=SMALL, hook="allreduce_hook")
# Gradients travel in float16.  With Gloo torch refuses the hook that sends them in bfloat16.
variant(
    "half_precision_hook", OnVectors, options=SMALL, hook="fp16_compress_hook", same_bits=False, on_four=True
)
