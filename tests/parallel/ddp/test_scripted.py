"""Modules of torch.jit, as a whole and as parts of others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import UsageError
from tests.parallel.models import fixed
from tests.parallel.training import assert_same_bits, on_ranks, wrapped

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),  # torch 2.15
]


_scripting = threading.Lock()


def _script(module: nn.Module) -> Any:
    with _scripting:  # two ranks are two threads, and torch compiles in one at a time
        return torch.jit.script(module)


class _Model(nn.Module):
    """A sparse table, running statistics and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=True)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(x)))


class _Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.last = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x))


def _trained(group: shoal.ProcessGroup, model: nn.Module, **options: Any) -> list[torch.Tensor]:
    wrapper = wrapped(group, fixed(model), **options)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        wrapper(torch.arange(5) % (1 + group.rank + step)).square().sum().backward()
        optimizer.step()
    return [tensor.detach() for tensor in (*wrapper.parameters(), *wrapper.buffers())]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
@on_ranks(2)
def test_scripted_modules_and_parts_train_like_others(
    group: shoal.ProcessGroup, options: dict[str, Any]
) -> None:
    for make in (lambda inner: inner, _Around):
        plain = _trained(group, make(_Model()), **options)
        for scripted in (_script(make(_Model())), make(_script(_Model()))):
            torch.testing.assert_close(_trained(group, scripted, **options), plain)
        assert_same_bits(*group.all_gather(plain[0]).wait())


@on_ranks(2)
def test_a_traced_module_trains(group: shoal.ProcessGroup) -> None:
    with _scripting:
        traced = torch.jit.trace(nn.Linear(4, 2), torch.ones(1, 4))
    model = wrapped(group, traced)
    model(torch.full((1, 4), 1.0 + group.rank)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.5] * 4] * 2


@on_ranks(1)
def test_a_parameter_that_was_replaced_in_a_script_is_named(group: shoal.ProcessGroup) -> None:
    model = wrapped(group, _Around(_script(_Model())))
    model.module.inner.head.weight = nn.Parameter(torch.ones(3, 4))
    with pytest.raises(UsageError, match=r"'inner.head.weight' was replaced"):
        model(torch.arange(3))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mixed_precision": shoal.MixedPrecision(param_dtype=torch.bfloat16)}, "mixed_precision"),
        ({"copies": 2}, "device_ids"),
    ],
    ids=["precision", "copies"],
)
@on_ranks(1)
def test_options_that_need_modules_in_python_say_so(
    group: shoal.ProcessGroup, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match=rf"{named}.* needs modules in Python.* the part 'inner'"):
        wrapped(group, _Around(_script(_Model())), **options)
