"""Small models, and training them in one process and on several ranks, for the tests of this folder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

import shoal
from shoal.testing import run_threads

#: So small that every model here has several buckets.
SMALL_MB = 0.0005

Batch = tuple[torch.Tensor, torch.Tensor]


def fixed(module: nn.Module) -> nn.Module:
    """``module`` with the same parameters in every call; torch's own generator is shared by the threads."""
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=random, dtype=torch.float64))
    return module


def mlp() -> nn.Module:
    """Nine parameters in double precision, one of them a scalar."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    module = nn.Sequential(
        nn.Linear(6, 16),
        nn.Tanh(),
        Scaled(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 3),
    )
    return fixed(module.double())


def batches(count: int, inputs: Sequence[int] = (6,), outputs: int = 3, size: int = 12) -> list[Batch]:
    """Random inputs and targets in double precision, the same in every call."""
    random = torch.Generator().manual_seed(99)
    return [
        (
            torch.randn(size, *inputs, generator=random, dtype=torch.float64),
            torch.randn(size, outputs, generator=random, dtype=torch.float64),
        )
        for _ in range(count)
    ]


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def part(batch: Batch, group: shoal.ProcessGroup) -> Batch:
    """This rank's equal share of a batch."""
    return batch[0][group.rank :: group.size], batch[1][group.rank :: group.size]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, data: Iterable[Batch], *, set_to_none: bool = True) -> None:
    """Plain training, of a model that may be wrapped."""
    optimizer = sgd(model)
    for batch in data:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, batch).backward()
        optimizer.step()


def train_on_ranks(
    model: nn.Module,
    data: Sequence[Batch],
    size: int,
    *,
    set_to_none: bool = True,
    bucket_cap_mb: float = SMALL_MB,
    **options: Any,
) -> list[nn.Module]:
    """Train copies of ``model`` on ``size`` ranks, each with its share of every batch; returns the copies.

    ``options`` are those of ``run_threads``.
    """

    def rank(group: shoal.ProcessGroup) -> nn.Module:
        own = copy.deepcopy(model)
        wrapped = shoal.DistributedDataParallel(own, group=group, bucket_cap_mb=bucket_cap_mb)
        train(wrapped, [part(batch, group) for batch in data], set_to_none=set_to_none)
        return own

    return run_threads(rank, size, timeout=60, **options)


def assert_same_parameters(actual: nn.Module, expected: nn.Module, *, rtol: float = 1e-9) -> None:
    for (name, a), b in zip(actual.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, msg=lambda text, name=name: f"{name}: {text}")


def on_ranks(size: int, fn: Callable[[shoal.ProcessGroup], object]) -> list[object]:
    """Run ``fn(group)`` on ranks that are threads."""
    return run_threads(fn, size, timeout=60)


def wrapped(group: shoal.ProcessGroup, module: nn.Module | None = None, **options: Any) -> nn.Module:
    """``module``, or else :func:`mlp`, wrapped with small buckets."""
    return shoal.DistributedDataParallel(
        mlp() if module is None else module, group=group, bucket_cap_mb=SMALL_MB, **options
    )


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def alone(*data: Batch, factor: float = 1.0) -> list[torch.Tensor]:
    """The gradients of :func:`mlp` that one process computes of whole batches, summed."""
    model = mlp()
    for batch in data:
        (factor * loss_of(model, batch)).backward()
    return gradients(model)


def assert_gradients(model: nn.Module, expected: Sequence[torch.Tensor]) -> None:
    torch.testing.assert_close(gradients(model), list(expected), rtol=1e-9, atol=1e-12)


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    """The gradients of both are close, and missing for the same parameters."""
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


def assert_all_equal(models: Sequence[nn.Module]) -> None:
    """The parameters have the same bits."""
    for model in models[1:]:
        for a, b in zip(model.parameters(), models[0].parameters(), strict=True):
            assert torch.equal(a, b)
