"""Steps of training that the tests of recorded steps record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

#: makes a step, and what it changes, on a device
Make = Callable[[str], tuple[Callable[..., Any], Any]]


class Digits(nn.Module):
    """A small convolutional network, with normalisation and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.head(self.drop(x.flatten(1)))  # type: ignore[no-any-return]


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.reshape(-1, 8, 8))[0][:, -1])  # type: ignore[no-any-return]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 10))


def _training(net: Callable[[], nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer]) -> Make:
    def make(device: str) -> tuple[Callable[..., Any], Any]:
        torch.manual_seed(1)
        model = net().to(device)
        opt = optimizer(model.parameters())

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            out = model(x)
            loss = F.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            return loss, out.detach()

        return step, (model, opt)

    return make


def state(changed: Any) -> Any:
    """Parameters, gradients and the optimiser's state."""
    model, opt = changed
    return (
        [p.detach() for p in model.parameters()],
        [p.grad for p in model.parameters()],
        opt.state_dict()["state"],
    )


TRAININGS: dict[str, Make] = {
    "digits, momentum": _training(Digits, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "MLP, SGD": _training(_mlp, lambda p: torch.optim.SGD(p, lr=0.1, foreach=False)),
    "MLP, AdamW": _training(_mlp, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
    "LSTM, momentum": _training(Sequences, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
}


def copied(tree: Any) -> Any:
    """A tree with copies of its tensors here."""
    return tree_map(lambda x: x.detach().cpu().clone() if isinstance(x, Tensor) else x, tree)


def until_replayed(step: Any, *args: Any) -> Any:
    """Call until a call is a replay; what that gives."""
    for _ in range(5):
        before = step.replays
        result = step(*args)
        if step.replays > before:
            return result
    raise AssertionError("no call was replayed")
