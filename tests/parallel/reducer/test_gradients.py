"""Gradients come into their buckets, whatever autograd made of them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.parallel.core import Pass
from shoal.parallel.reducer.gradient_streams import GradientStreams
from shoal.parallel.reducer.reducer import register_gradient_hooks
from tests.parallel.training import on_ranks, wrapped


class Parts(nn.Module):
    """Gradients of many kinds: contiguous, channels_last, expanded, of no elements, half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.matrix = nn.Parameter(torch.randn(5, 6).t())
        self.vector = nn.Parameter(torch.randn(7))
        self.large = nn.Parameter(torch.randn(300, 300))
        self.nothing = nn.Parameter(torch.empty(0))
        self.short = nn.Parameter(torch.randn(9).half())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.image, self.matrix, self.large, self.nothing, self.short)
        return sum(((part.float() * x).sum() for part in parts), self.vector.sum() * x)


@pytest.mark.parametrize("as_views", [True, False])
@on_ranks(2)
def test_every_kind_of_gradient_is_averaged_in_its_place(group: shoal.ProcessGroup, as_views: bool) -> None:
    inner = Parts()
    model = wrapped(group, inner, gradient_as_bucket_view=as_views)
    for _ in range(3):
        model.zero_grad()
        model(torch.tensor(float(group.rank + 1))).backward()
        for parameter in inner.parameters():
            assert torch.equal(parameter.grad, torch.full_like(parameter, 1.5))
            assert parameter.grad.stride() == parameter.stride()


@on_ranks(2)
def test_gradients_stay_where_they_are_when_they_are_set_to_zero_in_place(group: shoal.ProcessGroup) -> None:
    inner = Parts()
    model = wrapped(group, inner)
    model(torch.tensor(1.0)).backward()  # after it, buckets are made anew
    before = [parameter.grad for parameter in inner.parameters()]
    places = [gradient.data_ptr() for gradient in before]
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        model(torch.tensor(float(group.rank + 1))).backward()
        after = [parameter.grad for parameter in inner.parameters()]
        assert all(a is b for a, b in zip(after, before, strict=True))
        assert [gradient.data_ptr() for gradient in after] == places
        assert all(bool((gradient == 1.5).all()) for gradient in after)


@pytest.mark.parametrize("as_views", [True, False])
@on_ranks(2)
def test_a_gradient_that_is_conjugated_lazily_is_averaged(group: shoal.ProcessGroup, as_views: bool) -> None:
    class Conjugated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight.conj() * x).imag.sum()

    inner = Conjugated()
    model = wrapped(group, inner, gradient_as_bucket_view=as_views)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((3,), float(group.rank))).backward()
        torch.testing.assert_close(inner.weight.grad, torch.full((3,), -0.5j), check_dtype=False)


def test_no_gradient_of_another_device_is_heard_of_before_one_is_in_its_place() -> None:
    heard = threading.Event()
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]
    views = [torch.zeros_like(parameter) for parameter in parameters]
    parameters[0].grad, parameters[1].grad = torch.ones(2), views[1]
    passes = Pass([(0,), (1,)], [1, 1])
    passes.expect(True, 1)

    class Hearing:
        def preserve_referenced(self) -> None:
            pass

        def on_gradient(self, index: int, mark: int) -> None:
            heard.set()

    def hooked(index: int) -> None:
        for hook in list(parameters[index]._post_accumulate_grad_hooks.values()):
            hook(parameters[index])

    threads: list[threading.Thread] = []
    early: list[bool] = []

    def copy_to_bucket(index: int) -> None:
        threads.append(threading.Thread(target=hooked, args=(1,)))  # autograd's thread of the other device
        threads[0].start()
        early.append(heard.wait(0.2))

    gradients: Any = SimpleNamespace(
        has_copies=False,
        copied={0, 1},
        views=views,
        addresses=[view.data_ptr() for view in views],
        copy_to_bucket=copy_to_bucket,
    )
    hearing: Any = Hearing()
    hooks = register_gradient_hooks(hearing, passes, gradients, GradientStreams(), [parameters])
    hooked(0)
    threads[0].join(30)
    assert early == [False]
    assert passes.arrived == 2
    del hooks
