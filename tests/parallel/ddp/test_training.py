"""Training on several ranks equals training in one process with the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from tests.parallel.models import (
    SMALL_MB,
    assert_same_parameters,
    batches,
    fixed,
    loss_of,
    mlp,
    on_ranks,
    part,
    sgd,
    train,
    train_on_ranks,
)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_perceptron_trains_as_in_one_process(size: int, set_to_none: bool) -> None:
    expected, data = mlp(), batches(5)
    models = train_on_ranks(expected, data, size, set_to_none=set_to_none)
    train(expected, data)
    for model in models:
        assert_same_parameters(model, expected)


@pytest.mark.parametrize(
    "options",
    [{"hosts": ["a", "b", "c"]}, {"hosts": ["a", "a", "b"]}, {"concurrency": 4}],
    ids=["between hosts", "within and between hosts", "four lanes"],
)
def test_training_is_the_same_wherever_ranks_are_and_with_several_lanes(
    options: dict[str, Any],
) -> None:
    expected, data = mlp(), batches(3)
    models = train_on_ranks(expected, data, 3, **options)
    train(expected, data)
    for model in models:
        assert_same_parameters(model, expected)


def test_all_ranks_end_with_bitwise_the_same_parameters() -> None:
    first, *others = train_on_ranks(mlp().float(), [(x.float(), y.float()) for x, y in batches(4)], 3)
    for model in others:
        for a, b in zip(model.parameters(), first.parameters(), strict=True):
            assert torch.equal(a, b)


def test_one_bucket_for_everything_gives_the_same_as_many() -> None:
    expected, data = mlp(), batches(3)
    models = train_on_ranks(expected, data, 2, bucket_cap_mb=25)
    train(expected, data)
    assert_same_parameters(models[1], expected)


def test_a_convolutional_network_in_channels_last_trains_as_in_one_process() -> None:
    expected = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3),
        nn.Flatten(),
        nn.Linear(80, 3),
    )
    expected = fixed(expected.double()).to(memory_format=torch.channels_last)
    data = batches(3, inputs=(3, 6, 6))
    models = train_on_ranks(expected, data, 2)
    train(expected, data)
    assert_same_parameters(models[0], expected)
    assert_same_parameters(models[1], expected)


class Mixed(nn.Module):
    """Layers of four precisions, registered in turn so that neighbours never share a dtype."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for dtype in dtypes * 2)
        self.last = nn.Linear(6, 3, dtype=torch.float64)
        fixed(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x.to(layer.weight.dtype)))
        return self.last(x.double())


def test_parameters_of_several_dtypes_are_reduced_each_in_its_own() -> None:
    expected, data = Mixed(), batches(2)

    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor]:
        own = copy.deepcopy(expected)
        model = shoal.DistributedDataParallel(own, group=group, bucket_cap_mb=SMALL_MB)
        for batch in data:
            model.zero_grad()
            loss_of(model, part(batch, group)).backward()
        return [parameter.grad.clone() for parameter in own.parameters()]

    gradients = on_ranks(2, rank)
    loss_of(expected, data[-1]).backward()
    for mine, other, parameter in zip(*gradients, expected.parameters(), strict=True):
        assert mine.dtype == parameter.dtype
        assert torch.equal(mine, other)
        precision = {torch.float16: 2e-2, torch.bfloat16: 6e-2}.get(parameter.dtype, 1e-2)
        torch.testing.assert_close(
            mine, parameter.grad, rtol=precision, atol=precision * parameter.grad.abs().max()
        )


class Shared(nn.Module):
    """One layer used three times, and a parameter that two modules hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.twin = nn.Linear(6, 6)
        self.twin.bias = self.inner.bias
        self.last = nn.Linear(6, 3)
        fixed(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.inner(x))
        return self.last(self.twin(x))


def test_a_parameter_used_several_times_is_reduced_once() -> None:
    expected, data = Shared().double(), batches(4)
    models = train_on_ranks(expected, data, 2)
    train(expected, data)
    assert_same_parameters(models[0], expected)
    assert_same_parameters(models[1], expected)


def test_two_forward_passes_and_one_backward_reduce_the_sum() -> None:
    expected, data = mlp(), batches(4)

    def rank(group: shoal.ProcessGroup) -> nn.Module:
        own = copy.deepcopy(expected)
        model = shoal.DistributedDataParallel(own, group=group, bucket_cap_mb=SMALL_MB)
        optimizer = sgd(model)
        for one, two in (data[:2], data[2:]):
            optimizer.zero_grad()
            (loss_of(model, part(one, group)) + loss_of(model, part(two, group))).backward()
            optimizer.step()
        return own

    models = on_ranks(2, rank)
    optimizer = sgd(expected)
    for one, two in (data[:2], data[2:]):
        optimizer.zero_grad()
        (loss_of(expected, one) + loss_of(expected, two)).backward()
        optimizer.step()
    assert_same_parameters(models[1], expected)


def test_two_forward_passes_before_two_backward_passes_are_both_reduced() -> None:
    expected, data = mlp(), batches(2)

    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor]:
        own = copy.deepcopy(expected)
        model = shoal.DistributedDataParallel(own, group=group, bucket_cap_mb=SMALL_MB)
        losses = [loss_of(model, part(batch, group)) for batch in data]
        for loss in losses:
            loss.backward()
        return [parameter.grad.clone() for parameter in own.parameters()]

    gradients = on_ranks(2, rank)
    for batch in data:
        loss_of(expected, batch).backward()
    for mine, other, parameter in zip(*gradients, expected.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)
        assert torch.equal(mine, other)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_gradients_equal_those_of_the_batches_together(local: bool, set_to_none: bool) -> None:
    """With and without ``no_sync``: without it every backward reduces, which only costs more."""
    expected, data = mlp(), batches(6)

    def rank(group: shoal.ProcessGroup) -> nn.Module:
        own = copy.deepcopy(expected)
        model = shoal.DistributedDataParallel(own, group=group, bucket_cap_mb=SMALL_MB)
        optimizer = sgd(model)
        for step in range(0, 6, 3):
            optimizer.zero_grad(set_to_none=set_to_none)
            for batch in data[step : step + 2]:
                if local:
                    with model.no_sync():
                        loss_of(model, part(batch, group)).backward()
                else:
                    loss_of(model, part(batch, group)).backward()
            loss_of(model, part(data[step + 2], group)).backward()
            optimizer.step()
        return own

    models = on_ranks(2, rank)
    optimizer = sgd(expected)
    for step in range(0, 6, 3):
        optimizer.zero_grad()
        for batch in data[step : step + 3]:
            loss_of(expected, batch).backward()
        optimizer.step()
    assert_same_parameters(models[0], expected)
    assert_same_parameters(models[1], expected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("what", ["inside", "whole"])
def test_checkpointed_models_train_as_others_do(reentrant: bool, what: str) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    expected = mlp()
    data = [(x.requires_grad_(), y) for x, y in batches(3)]

    def rank(group: shoal.ProcessGroup) -> nn.Module:
        own = copy.deepcopy(expected)
        mine = [
            tuple(x.detach().requires_grad_(x.requires_grad) for x in part(batch, group)) for batch in data
        ]
        if what == "inside":
            train(shoal.DistributedDataParallel(Checkpointed(own), group=group, bucket_cap_mb=SMALL_MB), mine)
        else:
            train(Checkpointed(shoal.DistributedDataParallel(own, group=group, bucket_cap_mb=SMALL_MB)), mine)
        return own

    models = on_ranks(2, rank)
    train(expected, data)
    assert_same_parameters(models[0], expected)
    assert_same_parameters(models[1], expected)


def test_gradient_penalties_by_autograd_grad_reduce_only_in_backward() -> None:
    expected, (batch,) = mlp(), batches(1)

    def penalised(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (out**2).mean() + (slope**2).mean()

    def rank(group: shoal.ProcessGroup) -> list[torch.Tensor]:
        own = copy.deepcopy(expected)
        model = shoal.DistributedDataParallel(own, group=group, bucket_cap_mb=SMALL_MB)
        penalised(model, part(batch, group)[0]).backward()
        return [parameter.grad.clone() for parameter in own.parameters()]

    (mine, _) = on_ranks(2, rank)
    penalised(expected, batch[0]).backward()
    for gradient, parameter in zip(mine, expected.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
