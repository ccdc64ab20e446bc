"""A small model, its data and its training, for the cases of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .compare import World

FEATURES = 8


def mlp() -> nn.Sequential:
    """Three layers; 8 features in, 4 out."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(world: World, step: int) -> torch.Tensor:
    """Six samples: others on every rank, the same in every run."""
    return torch.randn(6, FEATURES, generator=torch.Generator().manual_seed(100 * step + world.rank))


def train(model: nn.Module, world: World, steps: int = 3, optimizer: Any = None) -> list[torch.Tensor]:
    """Trains with SGD and momentum, or with `optimizer`; returns the parameters and buffers."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(world, step)).square().mean().backward()
        optimizer.step()
    return [*model.parameters(), *model.buffers()]
