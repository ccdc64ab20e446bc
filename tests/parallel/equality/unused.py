"""Models of which parts are not used: everywhere, on some ranks, in some steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .case import Options, case
from .dense import OnVectors, perceptron


class _Mixture(nn.Module):
    """Experts behind a shared layer; the caller chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 12)
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        x = torch.tanh(self.shared(x))
        return self.head(torch.tanh(self.experts[expert](x)))


@case
class UnusedExperts(OnVectors):
    """Ranks and steps choose different experts: in each step some are used by one rank, some by none.

    Momentum and weight decay move a parameter whose gradient is zero and not one that has none.
    """

    options = Options(find_unused_parameters=True, bucket_cap_mb=0.004)

    def build(self) -> nn.Module:
        return _Mixture()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9, weight_decay=0.01)

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        inputs, targets = batch
        # The last expert is never used, the one before it only from step 20 on.
        expert = (step + self.rank) % (4 if step < 20 else 5)
        return ((model(inputs, expert) - targets) ** 2).mean()


@case
class UnusedExpertsWithZeroedGradients(UnusedExperts):
    """``zero_grad(set_to_none=False)``: what was used once has a gradient for ever."""

    sizes = (2,)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, step: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = self.loss(model, batch, step)
        loss.backward()
        optimizer.step()
        return loss


@case
class UnusedExpertsWithCopiedGradients(UnusedExperts):
    sizes = (2,)
    options = Options(**UnusedExperts.options, gradient_as_bucket_view=False)


@case
class UnusedExpertsLeftOut(UnusedExperts):
    """Buckets of which no rank uses a parameter are not sent."""

    sizes = (2,)
    options = Options(**UnusedExperts.options, skip_all_reduce_unused_params=True)


@case
class UnusedExpertsAccumulated(UnusedExperts):
    """An expert that only the local pass of a step used is reduced by the next pass."""

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, step: int) -> torch.Tensor:
        optimizer.zero_grad()
        with model.no_sync():
            self.loss(model, batch, step + 1).backward()
        loss = self.loss(model, batch, step)
        loss.backward()
        optimizer.step()
        return loss


class _Conditional(nn.Module):
    """Takes another way depending on its input, and sometimes none of the branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.left, self.right = nn.Linear(12, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tendency = x[0, 0].item()
        x = torch.tanh(self.stem(x))
        if tendency > 0.3:
            x = x + torch.tanh(self.left(x))
        elif tendency < -0.3:
            x = x + torch.tanh(self.right(torch.tanh(self.left(x))))
        return self.head(x)


@case
class ConditionalComputation(OnVectors):
    options = Options(find_unused_parameters=True)
    distinct = 7

    def build(self) -> nn.Module:
        return _Conditional()


class _TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.first, self.second = nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.stem(x))
        return self.first(x), self.second(x)


@case
class OutputsLeftOutOfTheLoss(OnVectors):
    """All parameters are in the graph of the outputs, but the loss takes only one output of two."""

    options = Options(find_unused_parameters=True)

    def build(self) -> nn.Module:
        return _TwoOutputs()

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        inputs, targets = batch
        return ((model(inputs)[step // 10 % 2] - targets) ** 2).mean()


class _Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(6, 6)
        self.used = perceptron(depth=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@case
class StaticGraphWithUnusedParameters(OnVectors):
    options = Options(static_graph=True, bucket_cap_mb=0.004)

    def build(self) -> nn.Module:
        return _Spare()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9, weight_decay=0.01)


@case
class StaticGraph(OnVectors):
    sizes = (2,)
    options = Options(static_graph=True, bucket_cap_mb=0.004)

    def build(self) -> nn.Module:
        return perceptron(depth=5)
