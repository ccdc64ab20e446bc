"""Uneven inputs: ranks run out of batches at different times."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .case import Options, case
from .dense import OnVectors, perceptron
from .unused import UnusedExperts


class Uneven(OnVectors):
    """Rank 0 has the fewest batches."""

    arguments = Options()

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], steps: int
    ) -> list[float]:
        losses = []
        with model.join(**self.arguments):
            for number in range(steps - 7 * (self.size - 1 - self.rank)):
                losses.append(self.step(model, optimizer, batches[number % len(batches)], number).item())
        return losses


@case
class UnevenInputs(Uneven):
    options = Options(bucket_cap_mb=0.004)

    def build(self) -> nn.Module:
        return perceptron(depth=5)


@case
class UnevenInputsDividedByActiveRanks(UnevenInputs):
    sizes = (2,)
    arguments = Options(divide_by_initial_world_size=False)


@case
class UnevenInputsWithUnusedExperts(Uneven, UnusedExperts):
    """Within the uneven inputs the ranks choose different experts.

    No momentum and no weight decay: with torch a rank that has run out repeats for ever which parameters it
    used, so an expert that nobody used in a step gets a gradient of zero there, and not none as here.
    """

    apart = ("absent",)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)


@case
class UnevenInputsWithAccumulation(UnevenInputs):
    sizes = (2,)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, step: int) -> torch.Tensor:
        optimizer.zero_grad()
        with model.no_sync():
            self.loss(model, batch, step).backward()
        loss = self.loss(model, batch, step)
        loss.backward()
        optimizer.step()
        return loss


@case
class UnevenInputsWithBatchNorm(Uneven):
    """Each step begins with the buffers of a rank that still trains: of the highest with torch, of rank 0 as
    long as it trains here.
    """

    apart = ("1.running_mean", "1.running_var")

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
