"""Using ZeroRedundancyOptimizer wrongly, changing the model under it, and what autograd is told."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import ZeroRedundancyOptimizer
from shoal.errors import ModelMismatch, UsageError
from tests.parallel.training import assert_same_bits, on_ranks, told_alike, values

from .training import gradients, mixed, train, zero


def _parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (list, "no parameters to optimise"),
        (lambda: iter([]), "no parameters to optimise"),
        (lambda: [{"params": []}], "no parameters to optimise"),
        (lambda: torch.ones(3), "must be an iterable of tensors or of dictionaries, got Tensor"),
        (lambda: 3, "must be an iterable of tensors or of dictionaries, got int"),
        (lambda: [_parameter(), "weight"], "parameter 1 must be a tensor, got str"),
        (lambda: [{"lr": 1}], r"a parameter group needs 'params', got \['lr'\]"),
        (
            lambda: [{"params": [_parameter()]}, {"params": [None]}],
            "parameter 1 must be a tensor, got NoneType",
        ),
        (lambda: [_parameter()] * 2, "given twice"),
    ],
)
@on_ranks(1)
def test_wrong_parameters_are_refused(
    group: shoal.ProcessGroup, params: Callable[[], Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ZeroRedundancyOptimizer(params(), torch.optim.Adam, group=group)


@pytest.mark.parametrize(
    ("optimizer_class", "message"),
    [
        (nn.Linear, "must be a class of torch.optim's kind, got <class"),
        ("Adam", "must be a class of torch.optim's kind, got 'Adam'"),
        (torch.optim.LBFGS, "LBFGS takes all parameters as one vector"),
    ],
)
@on_ranks(1)
def test_what_cannot_be_inside_is_refused(
    group: shoal.ProcessGroup, optimizer_class: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ZeroRedundancyOptimizer([_parameter()], optimizer_class, group=group)


def _mismatch(make: Callable[[int], Any], size: int = 3, **options: Callable[[int], Any]) -> str:
    """What all ranks are told alike."""

    def make_it(group: shoal.ProcessGroup) -> None:
        chosen = {name: choose(group.rank) for name, choose in options.items()}
        arguments = {"optimizer_class": torch.optim.SGD, "lr": 0.1, **chosen}
        ZeroRedundancyOptimizer(make(group.rank), group=group, **arguments)

    return told_alike(make_it, size)


def test_other_parameters_on_a_rank_are_named() -> None:
    message = _mismatch(lambda rank: nn.Linear(4, 5 if rank == 2 else 6).parameters())
    assert "rank 2: parameter 0 of group 0 is float32 [5, 4], requires grad, but float32 [6, 4]" in message
    assert "rank 1" not in message
    message = _mismatch(lambda rank: list(nn.Linear(2, 2, bias=rank != 1).named_parameters()))
    assert "rank 1: parameter 'bias' of group 0 is missing, float32 [2], requires grad on rank 0" in message


def test_other_options_on_a_rank_are_named() -> None:
    def parameters(_: int) -> list[nn.Parameter]:
        return [_parameter()]

    assert "rank 1: option lr of group 0 is 0.2, but 0.1 on rank 0" in _mismatch(
        parameters, lr=lambda rank: 0.2 if rank == 1 else 0.1
    )
    assert "is 'torch.optim.adam.Adam'" not in _mismatch(
        parameters, optimizer_class=lambda rank: [torch.optim.SGD, torch.optim.Adam, torch.optim.SGD][rank]
    )
    assert "rank 2: option parameters_as_bucket_view is True, but False" in _mismatch(
        parameters, parameters_as_bucket_view=lambda rank: rank == 2
    )


@on_ranks(2)
def test_a_group_that_differs_is_not_added(group: shoal.ProcessGroup) -> None:
    own = mixed()
    optimizer = zero(own, group)
    extra = nn.Linear(2, 2 + group.rank)
    with pytest.raises(ModelMismatch, match=r"rank 1: parameter 0 of group 1 is float32 \[3, 2\]"):
        optimizer.add_param_group({"params": extra.parameters()})
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 1
    train(own, optimizer)


@on_ranks(1)
def test_it_cannot_be_copied_or_pickled(group: shoal.ProcessGroup) -> None:
    optimizer = zero(mixed(), group)
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="cannot be pickled or copied"):
            duplicate(optimizer)


@on_ranks(2)
def test_it_looks_like_the_optimiser_inside(group: shoal.ProcessGroup) -> None:
    own = mixed()
    optimizer, plain = zero(own, group), torch.optim.Adam(own.parameters(), lr=0.01)
    assert optimizer.defaults == plain.defaults
    assert repr(optimizer) == repr(plain).replace("Adam", "ZeroRedundancyOptimizer", 1)
    gradients(own, 0)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in own.parameters())


@pytest.mark.parametrize("as_views", [False, True], ids=["copies", "views"])
@on_ranks(2)
def test_autograd_knows_of_updates_that_came_from_other_ranks(
    group: shoal.ProcessGroup, as_views: bool
) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = zero(layers, group, parameters_as_bucket_view=as_views)
    output = layers(torch.ones(2, 3, requires_grad=True)).sum()
    output.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@on_ranks(2)
def test_parameters_whose_data_is_replaced_are_taken_in_again(group: shoal.ProcessGroup) -> None:
    own, alone = mixed(), mixed()
    optimizer = zero(own, group, parameters_as_bucket_view=True)
    train(own, optimizer, [0])
    for parameter in own.parameters():
        parameter.data = parameter.data.clone()
    train(own, optimizer, [1])
    train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), [0, 1])
    assert_same_bits(values(own), values(alone))


@on_ranks(2)
def test_a_model_that_is_converted_later_is_refused(group: shoal.ProcessGroup) -> None:
    layer = nn.Linear(2, 2)
    optimizer = zero(layer, group, parameters_as_bucket_view=True)
    layer.double()
    with pytest.raises(UsageError, match=r"was torch.float32 .* is torch.float64 .*convert the model before"):
        optimizer.step()
