"""Ways to train: accumulation, clipping, compilation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .case import case, variant
from .dense import SMALL, OnVectors, perceptron


@case
class GradientAccumulation(OnVectors):
    """Two local passes, then one that reduces; gradients are set to None or to zero in turn."""

    options = SMALL

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, step: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        parts = list(zip(*(tensor.tensor_split(3) for tensor in batch), strict=True))
        with model.no_sync():
            for part in parts[:2]:
                (self.loss(model, part, step) / 3).backward()
        loss = self.loss(model, parts[2], step) / 3
        loss.backward()
        optimizer.step()
        return loss


class Accumulated(OnVectors):
    """A local pass as of the step after, then one that reduces."""

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, step: int) -> torch.Tensor:
        optimizer.zero_grad()
        with model.no_sync():
            self.loss(model, batch, step + 1).backward()
        loss = self.loss(model, batch, step)
        loss.backward()
        optimizer.step()
        return loss


@case
class GradientClipping(OnVectors):
    options = SMALL

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, step: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = self.loss(model, batch, step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss


@case
class SeveralParameterGroups(OnVectors):
    """The optimiser holds the module's parameters, in groups, and was made before wrapping."""

    def build(self) -> nn.Module:
        model = perceptron()
        self._optimizer = torch.optim.SGD(
            [{"params": model[:3].parameters()}, {"params": model[3:].parameters(), "lr": 0.02}],
            lr=0.05,
            nesterov=True,
            momentum=0.9,
        )
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self._optimizer


variant(
    "compiled_inside_the_wrapper",
    OnVectors,
    wrap=lambda _, model, wrapper: wrapper(torch.compile(model, backend="aot_eager")),
)
variant(
    "compiled_with_the_wrapper",
    OnVectors,
    wrap=lambda _, model, wrapper: torch.compile(wrapper(model), backend="eager"),
)
