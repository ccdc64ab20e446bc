"""Models whose autograd graph is not a plain chain: checkpoints, repeated parts, outputs of many kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..models import Shared
from .case import Options, case, variant
from .dense import SMALL, OnVectors


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


variant("checkpointed_non_reentrant_twice", OnVectors, lambda: _Checkpointed(False, 2), options=SMALL)
variant("checkpointed_reentrant", OnVectors, lambda: _Checkpointed(True), options=SMALL)
# The gradient of a layer comes once for every checkpoint that holds it.
variant(
    "checkpointed_twice_in_static_graph",
    OnVectors,
    lambda: _Checkpointed(True, 2),
    options=Options(**SMALL, static_graph=True),
    on_four=True,
)
variant("parameters_used_several_times", OnVectors, Shared)


@case
class Siamese(OnVectors):
    """Two forward passes through the wrapper, then one backward pass through both."""

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        inputs, targets = batch
        one, two = model(inputs), model(inputs.flip(0))
        return ((one - targets) ** 2).mean() + ((two - targets.flip(0)) ** 2).mean()


@dataclass
class _Answer:
    mean: torch.Tensor
    details: dict[str, Any]


class _Nested(nn.Module):
    kind: Any = _Answer

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.heads = nn.ModuleList(nn.Linear(12, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.tanh(self.stem(x))
        one, two, three, four = (head(x) for head in self.heads)
        details = {"rest": [two, (three, "a word")], "last": four, "number": 3, "nothing": None}
        return self.kind(mean=one, details=details)


@case
class OutputsInDataclass(OnVectors):
    """Found in it, and in the containers that it holds, for the search of unused parameters too."""

    options = Options(find_unused_parameters=True)

    def build(self) -> nn.Module:
        return _Nested()

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        inputs, targets = batch
        answer = model(inputs)
        mean, details = answer.values() if isinstance(answer, dict) else (answer.mean, answer.details)
        guess = mean + details["rest"][0] + details["rest"][1][0] * details["last"]
        return ((guess - targets) ** 2).mean()


class _InDictionaries(_Nested):
    kind = dict


variant("outputs_in_dictionaries", OutputsInDataclass, _InDictionaries, options=Options())
