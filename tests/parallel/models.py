"""The models and the data of the tests of training; ``training`` tells how they are used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Batch = tuple[torch.Tensor, torch.Tensor]


def fixed(module: nn.Module) -> Any:
    """``module`` with the same parameters in every call; torch's own generator is shared by the threads."""
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=random, dtype=torch.float64))
    return module


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def mlp(dtype: torch.dtype = torch.float64) -> Any:
    """Nine parameters, one of them a scalar."""
    layers = [nn.Linear(6, 16), nn.Tanh(), Scaled(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)]
    return fixed(nn.Sequential(*layers, nn.Tanh(), nn.Linear(16, 3)).to(dtype))


class Experts(nn.Module):
    """A layer for all, and experts of which a call uses those that it names, in this order."""

    def __init__(self, count: int = 4, width: int = 6) -> None:
        super().__init__()
        self.common = nn.Linear(6, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, chosen: Iterable[int] = ()) -> torch.Tensor:
        x = torch.tanh(self.common(x))
        for index in chosen:
            x = torch.tanh(self.experts[index](x))
        return self.head(x)


class Words(nn.Module):
    """A table with sparse gradients, which a call may leave out, one with dense ones, and a layer."""

    def __init__(self, kind: type[nn.Embedding] | type[nn.EmbeddingBag] = nn.Embedding) -> None:
        super().__init__()
        self.table = kind(50, 4, sparse=True)
        self.dense = nn.Embedding(50, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        hidden = self.dense(x).mean(1)
        if use:
            table = self.table(x)
            hidden = hidden + (table if table.ndim == 2 else table.mean(1))
        return self.head(hidden)


class Normed(nn.Module):
    """Batch normalisation, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


class Mixed(nn.Module):
    """Layers of four precisions, registered in turn so that neighbours never share a dtype."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for dtype in dtypes * 2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x.to(layer.weight.dtype))).to(x.dtype)
        return self.head(x.to(self.head.weight.dtype))


class Shared(nn.Module):
    """A layer used three times, and a parameter that two modules hold."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again, self.twin = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.twin.bias = self.again.bias
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.into(x))
        for _ in range(3):
            x = x + torch.tanh(self.again(x)) * self.again.weight.mean()
        return self.head(self.twin(x))


class Checkpointed(nn.Module):
    """``inner``, with its activations computed again in backward."""

    def __init__(self, inner: nn.Module, reentrant: bool, times: int = 1) -> None:
        super().__init__()
        self.inner, self.reentrant, self.times = inner, reentrant, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return x


def batches(
    count: int,
    inputs: Sequence[int] = (6,),
    outputs: int = 3,
    size: int = 12,
    dtype: torch.dtype = torch.float64,
) -> list[Batch]:
    """Random inputs and targets, the same in every call."""
    random = torch.Generator().manual_seed(99)
    drawn = [
        tuple(
            torch.randn(size, *shape, generator=random, dtype=torch.float64) for shape in (inputs, (outputs,))
        )
        for _ in range(count)
    ]
    return [(x.to(dtype), y.to(dtype)) for x, y in drawn]


def sentences(count: int) -> list[Batch]:
    """Batches whose inputs are five words each."""
    random = torch.Generator().manual_seed(5)
    words = [torch.randint(0, 50, (12, 5), generator=random) for _ in range(count)]
    return [(x, y) for x, (_, y) in zip(words, batches(count), strict=True)]


def loss_of(model: nn.Module, batch: Batch, *more: Any) -> torch.Tensor:
    """The mean squared error; ``more`` goes to the model."""
    return ((model(batch[0], *more).to(batch[1].dtype) - batch[1]) ** 2).mean()


def part(batch: Batch, place: Any) -> Batch:
    """The equal share of a batch that a rank has; ``place`` is a group or a ``Place``."""
    return batch[0][place.rank :: place.size], batch[1][place.rank :: place.size]
