"""Models whose autograd graph is not a plain chain: checkpoints, repeated parts, outputs of many kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .case import Options, case
from .dense import OnVectors, perceptron


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, times: int = 1) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 24)
        self.middle = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 24))
        self.after = nn.Sequential(nn.Linear(24, 24), nn.Tanh())
        self.head = nn.Linear(24, 3)
        self.reentrant, self.times = reentrant, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        for _ in range(self.times):
            x = x + checkpoint(self.middle, x, use_reentrant=self.reentrant)
        x = checkpoint(self.after, x, use_reentrant=self.reentrant)
        return self.head(x)


@case
class CheckpointedNonReentrant(OnVectors):
    options = Options(bucket_cap_mb=0.004)

    def build(self) -> nn.Module:
        return _Checkpointed(False)


@case
class CheckpointedNonReentrantTwice(OnVectors):
    sizes = (2,)
    options = Options(bucket_cap_mb=0.004)

    def build(self) -> nn.Module:
        return _Checkpointed(False, times=2)


@case
class CheckpointedReentrant(OnVectors):
    options = Options(bucket_cap_mb=0.004)

    def build(self) -> nn.Module:
        return _Checkpointed(True)


@case
class CheckpointedTwiceInStaticGraph(OnVectors):
    """The gradient of a layer comes once for every checkpoint that holds it."""

    options = Options(static_graph=True, bucket_cap_mb=0.004)

    def build(self) -> nn.Module:
        return _Checkpointed(True, times=2)


class _Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 12)
        self.again = nn.Linear(12, 12)
        self.twin = nn.Linear(12, 12)
        self.twin.bias = self.again.bias
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.into(x))
        for _ in range(3):
            x = x + torch.tanh(self.again(x)) * self.again.weight.mean()
        return self.head(self.twin(x))


@case
class ParametersUsedSeveralTimes(OnVectors):
    def build(self) -> nn.Module:
        return _Repeated()


@case
class Siamese(OnVectors):
    """Two forward passes through the wrapper, then one backward pass through both."""

    def build(self) -> nn.Module:
        return perceptron()

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        inputs, targets = batch
        one, two = model(inputs), model(inputs.flip(0))
        return ((one - targets) ** 2).mean() + ((two - targets.flip(0)) ** 2).mean()


@dataclass
class _Answer:
    mean: torch.Tensor
    details: dict[str, Any]


class _Nested(nn.Module):
    def __init__(self, as_dataclass: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.heads = nn.ModuleList(nn.Linear(12, 3) for _ in range(4))
        self.as_dataclass = as_dataclass

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.tanh(self.stem(x))
        one, two, three, four = (head(x) for head in self.heads)
        details = {"rest": [two, (three, "a word")], "last": four, "number": 3, "nothing": None}
        return _Answer(one, details) if self.as_dataclass else {"mean": one, "details": details}


@case
class OutputsInDictionaries(OnVectors):
    sizes = (2,)

    def build(self) -> nn.Module:
        return _Nested(as_dataclass=False)

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        inputs, targets = batch
        answer = model(inputs)
        mean, details = answer["mean"], answer["details"]
        guess = mean + details["rest"][0] + details["rest"][1][0] * details["last"]
        return ((guess - targets) ** 2).mean()


@case
class OutputsInDataclass(OnVectors):
    """Found in it, and in the containers that it holds, for the search of unused parameters too."""

    options = Options(find_unused_parameters=True)

    def build(self) -> nn.Module:
        return _Nested(as_dataclass=True)

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        inputs, targets = batch
        answer = model(inputs)
        guess = (
            answer.mean + answer.details["rest"][0] + answer.details["rest"][1][0] * answer.details["last"]
        )
        return ((guess - targets) ** 2).mean()
