"""Uneven inputs: ranks run out of batches at different times."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .case import Options, case, variant
from .dense import SMALL, OnVectors, perceptron
from .procedures import Accumulated
from .unused import UnusedExperts


class Uneven(OnVectors):
    """Rank 0 has the fewest batches."""

    arguments = Options()

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], steps: int
    ) -> list[float]:
        with model.join(**self.arguments):
            return super().train(model, optimizer, batches, steps - 3 * (self.size - 1 - self.rank))


@case
class UnevenInputs(Uneven):
    on_four = True
    options = SMALL

    def build(self) -> nn.Module:
        return perceptron(depth=5)


variant(
    "uneven_inputs_divided_by_active_ranks",
    UnevenInputs,
    arguments=Options(divide_by_initial_world_size=False),
)
variant("uneven_inputs_with_accumulation", UnevenInputs, step=Accumulated.step)


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
class UnevenInputsWithBatchNorm(Uneven):
    """Each step begins with the buffers of a rank that still trains: of the highest with torch, of rank 0 as
    long as it trains here.
    """

    on_four = True
    apart = ("1.running_mean", "1.running_var")

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
