"""What the two wrappers train: a model, its data and its training step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn

#: Keyword arguments.
Options: TypeAlias = dict[str, Any]

#: The cases by name, filled by :func:`case`.
CASES: dict[str, type[Case]] = {}


class Case:
    """One model and its training.  What a subclass does not define is plain training with SGD and momentum.

    The same methods serve both wrappers: nothing here may ask which one it is.

    Attributes:
        on_four: whether four ranks show what two do not.  Every case runs on two; the others run on four
            under ``stress`` only, where nothing differs but the order of the sums.
        options: of both DistributedDataParallel classes, beyond the group.
        hook: name of a communication hook that both have.
        same_bits: whether two ranks must train alike in every bit.  A sum of two terms has one order, and a
            division by two rounds nothing, unless the number is among the smallest of its dtype, as gradients
            in float16 may be.
        apart: names of parts of the state in which the wrappers differ, for a reason that the case tells.
        distinct: how many different batches there are; they are repeated in turn.
        lr: learning rate.
    """

    on_four: ClassVar[bool] = False
    options: ClassVar[Options] = Options()
    hook: ClassVar[str] = ""
    same_bits: ClassVar[bool] = True
    apart: ClassVar[tuple[str, ...]] = ()
    distinct: ClassVar[int] = 5
    lr: ClassVar[float] = 0.05

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def build(self) -> nn.Module:
        """The model, with random parameters."""
        raise NotImplementedError

    def wrap(self, model: nn.Module, wrapper: Callable[..., nn.Module]) -> nn.Module:
        """``model`` wrapped for training."""
        return wrapper(model, **self.options)

    def batch(self, random: torch.Generator) -> Any:
        """This rank's part of a batch."""
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        """The loss of a batch of inputs and targets."""
        inputs, targets = batch
        return ((model(inputs) - targets) ** 2).mean()

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, step: int) -> torch.Tensor:
        """Train on one batch; returns the loss."""
        optimizer.zero_grad()
        loss = self.loss(model, batch, step)
        loss.backward()
        optimizer.step()
        return loss

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], steps: int
    ) -> list[float]:
        """Train for ``steps`` steps; returns the losses."""
        return [
            self.step(model, optimizer, batches[number % len(batches)], number).item()
            for number in range(steps)
        ]


def case(cls: type[Case]) -> type[Case]:
    """Class decorator: list the case under its name in words."""
    CASES[re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()] = cls
    return cls


def variant(name: str, base: type[Case], build: Callable[[], nn.Module] | None = None, **other: Any) -> None:
    """List a case that differs from ``base`` in its model or in attributes; it need not run on four ranks."""
    attributes = {"on_four": False, **other, **({} if build is None else {"build": lambda _: build()})}
    CASES[name] = type(name, (base,), attributes)


def regression(random: torch.Generator, *shape: int, rows: int = 8, outputs: int = 3) -> Any:
    """Inputs, and targets that are a smooth function of them."""
    inputs = torch.randn(rows, *shape, generator=random)
    flat = inputs.flatten(1)
    return inputs, torch.stack([torch.sin(flat.roll(k, 1)[:, :4].sum(1)) for k in range(outputs)], 1)
