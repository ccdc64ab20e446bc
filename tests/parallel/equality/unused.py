"""Models of which parts are not used: everywhere, on some ranks, in some steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..models import Experts
from .case import Options, case, variant
from .dense import SMALL, OnVectors, perceptron
from .procedures import Accumulated


class Decaying(OnVectors):
    """Momentum and weight decay move a parameter whose gradient is zero and not one that has none."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9, weight_decay=0.01)


@case
class UnusedExperts(Decaying):
    """Ranks and steps choose different experts: in each step some are used by one rank, some by none."""

    on_four = True
    options = Options(**SMALL, find_unused_parameters=True)

    def build(self) -> nn.Module:
        return Experts(6, 12)

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        inputs, targets = batch
        # The last expert is never used, the one before it only from step 8 on.
        expert = (step + self.rank) % (4 if step < 8 else 5)
        return ((model(inputs, (expert,)) - targets) ** 2).mean()


@case
class UnusedExpertsWithZeroedGradients(UnusedExperts):
    """``zero_grad(set_to_none=False)``: what was used once has a gradient for ever."""

    on_four = False

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model)
        optimizer.zero_grad = lambda: model.zero_grad(set_to_none=False)
        return optimizer


# Buckets of which no rank uses a parameter are not sent.
for _name, _options in {
    "unused_experts_with_copied_gradients": Options(gradient_as_bucket_view=False),
    "unused_experts_left_out": Options(skip_all_reduce_unused_params=True),
}.items():
    variant(_name, UnusedExperts, options=Options(**UnusedExperts.options, **_options))
# An expert that only the local pass of a step used is reduced by the next pass.
variant("unused_experts_accumulated", UnusedExperts, step=Accumulated.step)


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


variant(
    "conditional_computation",
    OnVectors,
    _Conditional,
    options=Options(find_unused_parameters=True),
    distinct=7,
)


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
        return ((model(inputs)[step // 4 % 2] - targets) ** 2).mean()


class _Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(6, 6)
        self.used = perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


variant("static_graph", OnVectors, options=Options(**SMALL, static_graph=True))
variant("static_graph_with_unused_parameters", Decaying, _Spare, options=Options(**SMALL, static_graph=True))
