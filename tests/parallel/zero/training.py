"""Training the same model with an optimiser alone and distributed, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import shoal
from shoal import ZeroRedundancyOptimizer
from tests.parallel.models import batches, fixed, loss_of

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


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_bitwise(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {index} differs by {(a - b).abs().max()}"


def zero(
    model: nn.Module,
    group: shoal.ProcessGroup,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
    groups: Callable[[nn.Module], Any] = nn.Module.parameters,
    **options: Any,
) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(groups(model), optimizer_class, group=group, **{"lr": 0.01, **options})
