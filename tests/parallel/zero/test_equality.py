"""A distributed optimiser does what the one inside does alone, bit for bit, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import shoal
from shoal.testing import run_threads
from tests.parallel.models import batches, fixed, loss_of, mlp
from tests.parallel.training import assert_as_simulated, assert_same_bits, pairwise, steps, values

from .training import STEPS, adam, gradients, groups_of, mixed, named, train, zero

#: classes of optimisers, and their options
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"foreach": False}),
}


def _compare(
    make: Callable[[], nn.Module],
    sizes: tuple[int, ...],
    run: Callable[[nn.Module, torch.optim.Optimizer], object] = train,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
    groups: Callable[[nn.Module], Any] = nn.Module.parameters,
    as_views: bool = False,
    ranks: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Run with the optimiser alone and on ranks; all parameters must be equal at the end."""
    alone = make()
    done = run(alone, optimizer_class(groups(alone), **{"lr": 0.01, **options}))

    def rank(group: shoal.ProcessGroup) -> tuple[list[torch.Tensor], object]:
        own = make()
        optimizer = zero(own, group, optimizer_class, groups, parameters_as_bucket_view=as_views, **options)
        result = run(own, optimizer)
        return values(own), result

    for size in sizes:
        for trained, result in run_threads(rank, size, **(ranks or {})):
            assert_same_bits(trained, values(alone))
            assert result == done


@pairwise(name=OPTIMIZERS, as_views=[False, True], size=[1, 2, 3, 4])
def test_one_to_four_ranks_train_as_one(name: str, as_views: bool, size: int) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    _compare(mixed, (size,), train, optimizer_class, as_views=as_views, **options)


@pytest.mark.parametrize("as_views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("groups", [groups_of, named])
def test_parameter_groups_and_names_are_respected(groups: Callable[[nn.Module], Any], as_views: bool) -> None:
    _compare(mixed, (3,), train, torch.optim.AdamW, groups, as_views=as_views)


def test_more_ranks_than_parameters_and_hosts_without_shared_memory() -> None:
    _compare(lambda: fixed(nn.Linear(6, 3).double()), (4,), ranks={"hosts": ["a", "a", "b", "b"]})


@pytest.mark.parametrize(
    "name", ["Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adadelta", "ASGD", "Adafactor"]
)
def test_any_optimiser_of_torch_can_be_inside(name: str) -> None:
    _compare(mlp, (3,), train, getattr(torch.optim, name))


def test_schedulers_and_edited_groups_reach_the_optimiser_inside() -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        schedule = lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
                lr_scheduler.CosineAnnealingLR(optimizer, 4),
            ],
            milestones=[2],
        )
        rates = []
        for step in range(2 * STEPS):
            train(model, optimizer, [step])
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
            if step == 5:
                optimizer.param_groups[1]["weight_decay"] = 0.3
        return rates, schedule.get_last_lr()

    _compare(mixed, (2,), run, torch.optim.AdamW, groups_of)


def test_a_one_cycle_schedule_changes_momentum_too() -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
        for step in range(STEPS):
            train(model, optimizer, [step])
            schedule.step()
        return optimizer.param_groups[0]["betas"]

    _compare(mlp, (2,), run)


def test_a_closure_is_evaluated_and_its_loss_returned() -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        data = batches(STEPS)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, data[0])
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(STEPS)]  # type: ignore[attr-defined, arg-type]

    _compare(mlp, (2,), run)


def test_hooks_run_once_a_step_and_see_the_whole_optimiser() -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        log: list[object] = []
        optimizer.register_step_pre_hook(
            lambda own, args, kwargs: log.append(("before", len(own.param_groups[0]["params"])))
        )
        optimizer.register_step_post_hook(lambda own, args, kwargs: log.append("after"))
        train(model, optimizer)
        return log

    _compare(mlp, (2,), run)


def test_parameters_without_gradients_and_frozen_ones_stay() -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        for step, parameter in enumerate(model.parameters()):
            optimizer.zero_grad()
            gradients(model, step)
            parameter.grad = None
            optimizer.step()
        return None

    def make() -> nn.Module:
        model = mixed()
        model.wide.requires_grad_(False)
        return model

    _compare(make, (2,), run)
    _compare(make, (3,), run, as_views=True)


@pytest.mark.parametrize("as_views", [False, True], ids=["copies", "views"])
def test_layers_may_thaw_and_groups_be_added_while_training(as_views: bool) -> None:
    def make() -> nn.Module:
        model = mixed()
        model.wide.requires_grad_(False)
        model.first.requires_grad_(False)
        return model

    def groups(model: nn.Module) -> list[nn.Parameter]:
        return [parameter for name, parameter in model.named_parameters() if not name.startswith("first")]

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        train(model, optimizer)
        model.wide.requires_grad_(True)
        train(model, optimizer)
        model.first.requires_grad_(True)
        optimizer.add_param_group({"params": model.first.parameters(), "lr": 0.05})
        train(model, optimizer)
        return [{**group, "params": len(group["params"])} for group in optimizer.param_groups]

    _compare(make, (3,), run, torch.optim.Adam, groups, as_views=as_views)


def test_sparse_gradients_go_through_to_an_optimiser_that_takes_them() -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.tensor([1, 2, step])).square().sum().backward()
            optimizer.step()
        return None

    _compare(lambda: fixed(nn.Embedding(20, 3, sparse=True)), (2,), run, torch.optim.SparseAdam)


@pytest.mark.parametrize("as_views", [False, True], ids=["copies", "views"])
def test_with_distributed_data_parallel_all_ranks_train_one_model(as_views: bool) -> None:
    def program(model: nn.Module, place: Any) -> Iterator[None]:
        return steps(batches(STEPS), optimizer=lambda model: adam(model, place, as_views))(model, place)

    assert_as_simulated(program, 3)
