"""Who owns what; ZeroRedundancyOptimizer used wrongly, the model changed under it, what autograd is told."""

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
from shoal.parallel.zero.partition import Partition
from shoal.testing import run_threads
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
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="cannot be copied or pickled"):
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


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.eye(3).to_sparse(), "its layout is torch.sparse_coo"),
        (lambda: torch.ones(3, device="meta"), "it is on the meta device"),
        (lambda: torch.ones(1).expand(3), "it is expanded"),
    ],
    ids=["sparse", "meta", "expanded"],
)
@on_ranks(2)
def test_parameters_that_cannot_be_sent_are_refused_on_all_ranks(
    group: shoal.ProcessGroup, make: Callable[[], torch.Tensor], reason: str
) -> None:
    parameters = [_parameter(), nn.Parameter(make())]
    with pytest.raises(UsageError, match=f"parameter 1 of group 0: {reason}"):
        ZeroRedundancyOptimizer(parameters, torch.optim.SGD, group=group, lr=0.1)
    alone = parameters if group.rank == 1 else [_parameter(), nn.Parameter(torch.ones(3, 3))]
    with pytest.raises(ModelMismatch):
        ZeroRedundancyOptimizer(alone, torch.optim.SGD, group=group, lr=0.1)


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
    with pytest.raises(
        UsageError, match=r"was torch.float32 .* is torch.float64 .*convert the model before making"
    ):
        optimizer.step()


def _owners(sizes: list[int], ranks: int) -> list[int]:
    parameters = [torch.empty(size, requires_grad=True) for size in sizes]
    partition = Partition(ranks)
    partition.add(parameters)
    return [partition.owner(parameter) for parameter in parameters]


def test_the_largest_goes_to_the_rank_that_has_least() -> None:
    assert _owners([3, 10, 6, 5, 4], 2) == [1, 0, 1, 1, 0]
    assert _owners([1, 1, 1, 1], 2) == [0, 1, 0, 1]
    assert _owners([5], 3) == [0]


def test_frozen_parameters_and_later_ones_are_shared_out_by_themselves() -> None:
    partition = Partition(2)
    frozen = [torch.empty(100), torch.empty(90)]
    trained = [torch.empty(8, requires_grad=True), torch.empty(2, requires_grad=True)]
    partition.add([*frozen, *trained])
    assert [partition.owner(one) for one in (*frozen, *trained)] == [0, 1, 0, 1]
    later = torch.empty(1, requires_grad=True)
    partition.add([later])
    assert partition.owner(later) == 1
    assert partition.owner(trained[0]) == 0


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.SGD])
def test_the_state_of_a_rank_is_its_share(optimizer_class: type[torch.optim.Optimizer]) -> None:
    def model() -> nn.Module:
        return nn.Sequential(*[nn.Linear(32, 32, dtype=torch.float64) for _ in range(12)], nn.Linear(32, 3))

    options = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}

    def rank(group: shoal.ProcessGroup) -> int:
        own = mixed()
        optimizer = zero(own, group, optimizer_class, **options)
        train(own, optimizer, [0])
        deep = model()
        optimizer = zero(deep, group, optimizer_class, **options)
        for parameter in deep.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return sum(
            value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim()
        )

    (whole,) = run_threads(rank, 1)
    for size in (2, 4):
        parts = run_threads(rank, size)
        assert sum(parts) == whole
        assert max(parts) <= 1.05 * whole / size
