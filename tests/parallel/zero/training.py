"""Training with an optimiser alone and distributed; all ranks have the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import shoal
from shoal import ZeroRedundancyOptimizer
from tests.parallel.models import batches, fixed, loss_of
from tests.parallel.training import Place

STEPS = 4


def mixed() -> nn.Module:
    """Parameters of two dtypes, large and small ones, a scalar, an empty one and a channels_last one."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 300)
            self.wide = nn.Linear(300, 100)  # more than SMALL_BYTES
            self.last = nn.Linear(100, 3).double()
            self.convolution = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
            self.factor = nn.Parameter(torch.ones(()))
            self.empty = nn.Parameter(torch.empty(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            image = self.convolution(x.float().repeat(1, 3).reshape(-1, 2, 3, 3))
            hidden = torch.tanh(self.first(x.float())) + image.mean() + self.empty.sum()
            return self.last(torch.tanh(self.wide(hidden)).double()) * self.factor

    return fixed(Mixed())


def gradients(model: nn.Module, step: int) -> None:
    """Those of the ``step``th batch, the same on every rank."""
    data = batches(STEPS)
    loss_of(model, data[step % STEPS]).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int] = range(STEPS)) -> None:
    for step in steps:
        optimizer.zero_grad()
        gradients(model, step)
        optimizer.step()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, the rest does not and learns at another rate."""
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def zero(
    model: nn.Module,
    group: shoal.ProcessGroup | None,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
    groups: Callable[[nn.Module], Any] = nn.Module.parameters,
    **options: Any,
) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(groups(model), optimizer_class, group=group, **{"lr": 0.01, **options})


def adam(model: nn.Module, place: Place | shoal.ProcessGroup, as_views: bool) -> torch.optim.Optimizer:
    """Distributed in a group, alone in the simulation of one."""
    if isinstance(place, Place):
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return zero(model, place, parameters_as_bucket_view=as_views)
