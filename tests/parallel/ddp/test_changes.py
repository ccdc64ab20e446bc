"""What is done to a wrapped module, its parameters and their gradients between the steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import shoal
from tests.parallel.models import (
    Batch,
    alone,
    assert_gradients,
    assert_same_parameters,
    batches,
    fixed,
    loss_of,
    mlp,
    on_ranks,
    part,
    sgd,
    wrapped,
)


def test_a_copy_of_the_module_is_independent() -> None:
    data = batches(2)

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group)
        loss_of(model, part(data[0], group)).backward()
        twin = copy.deepcopy(model.module)
        if group.rank == 0:  # would hang if it communicated
            twin.zero_grad()
            loss_of(twin, data[1]).backward()
            assert_gradients(twin, alone(data[1]))
        assert_gradients(model, alone(data[0]))
        model.zero_grad()
        loss_of(model, part(data[1], group)).backward()
        assert_gradients(model, alone(data[1]))

    on_ranks(2, rank)


def test_training_goes_on_from_a_state_dict() -> None:
    data = batches(6)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, some: Sequence[Batch]) -> None:
        for batch in some:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    def rank(group: shoal.ProcessGroup) -> nn.Module:
        mine = [part(batch, group) for batch in data]
        first = wrapped(group)
        optimizer = sgd(first)
        steps(first, optimizer, mine[:3])
        saved = copy.deepcopy({"model": first.module.state_dict(), "optimizer": optimizer.state_dict()})
        second = wrapped(group, nn.Sequential(*(copy.deepcopy(layer) for layer in mlp())))
        steps(second, sgd(second), mine[4:])  # training of its own, which loading undoes
        second.module.load_state_dict(saved["model"])
        optimizer = sgd(second)
        optimizer.load_state_dict(saved["optimizer"])
        steps(second, optimizer, mine[3:])
        return second.module

    models = on_ranks(2, rank)
    expected = mlp()
    steps(expected, sgd(expected), data)
    for model in models:
        assert_same_parameters(model, expected)


def test_layers_frozen_and_thawed_between_steps_get_gradients_again() -> None:
    """Parameters that were trained when the model was wrapped may be frozen where unused ones are allowed."""
    data = batches(5)

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group, find_unused_parameters=True)
        plain = mlp()
        for step, batch in enumerate(data):
            for each in (model.module, plain):
                each.zero_grad()
                each[3].requires_grad_(step % 2 == 0)
            loss_of(model, part(batch, group)).backward()
            loss_of(plain, batch).backward()
            for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert (mine.grad is None) == (expected.grad is None)
                if expected.grad is not None:
                    torch.testing.assert_close(mine.grad, expected.grad)

    on_ranks(2, rank)


def test_a_parameter_replaced_after_wrapping_is_named() -> None:
    (batch,) = batches(1)

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group)
        loss_of(model, part(batch, group)).backward()
        model.module[3].weight = nn.Parameter(torch.zeros(16, 16, dtype=torch.float64))
        with pytest.raises(shoal.errors.ShoalError, match=r"'3\.weight'"):
            loss_of(model, part(batch, group)).backward()

    on_ranks(2, rank)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_a_module_whose_memory_changes_is_still_reduced() -> None:
    """``Module.to`` exchanges the memory of gradients behind the tensors that were there before."""

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group, fixed(nn.Conv2d(2, 3, 3, bias=False)))
        x = torch.full((1, 2, 3, 3), float(group.rank))
        for layout in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
            model.to(memory_format=layout)
            for set_to_none in (False, True):
                model.zero_grad(set_to_none=set_to_none)
                model(x).sum().backward()
                assert set(model.module.weight.grad.flatten().tolist()) == {0.5}

    on_ranks(2, rank)


def test_a_parameter_of_another_dtype_than_at_wrapping_is_named() -> None:
    class Casting(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = layer(x.to(layer.weight.dtype))
            return x

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group, Casting(nn.Linear(2, 2), nn.Linear(2, 1)))
        model(torch.ones(1, 2)).sum().backward()
        model.module[1].double()
        for _ in range(2):
            model.zero_grad()
            with pytest.raises(shoal.errors.ShoalError, match=r"'1\.(weight|bias)'"):
                model(torch.ones(1, 2)).sum().backward()

    on_ranks(2, rank)


def test_copied_gradients_that_are_kept_are_not_overwritten() -> None:
    data = batches(3)

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group, gradient_as_bucket_view=False)
        kept = []
        for batch in data:
            model.zero_grad()
            loss_of(model, part(batch, group)).backward()
            kept.append([parameter.grad for parameter in model.parameters()])
        for held, batch in zip(kept, data, strict=True):
            torch.testing.assert_close(held, alone(batch))

    on_ranks(2, rank)


def test_gradients_that_the_user_replaces_are_reduced_with_the_next_pass() -> None:
    """Accumulation continues from whatever ``grad`` holds, if it is the same on all ranks."""
    data = batches(2)

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group)
        loss_of(model, part(data[0], group)).backward()
        for parameter in model.parameters():
            parameter.grad = 2 * parameter.grad
        loss_of(model, part(data[1], group)).backward()
        expected = [2 * a + b for a, b in zip(alone(data[0]), alone(data[1]), strict=True)]
        assert_gradients(model, expected)

    on_ranks(2, rank)


@pytest.mark.parametrize("overflowing", [None, 1])
def test_a_gradient_scaler_decides_the_same_on_all_ranks(overflowing: int | None) -> None:
    data = [(x.float(), y.float()) for x, y in batches(3)]

    def rank(group: shoal.ProcessGroup) -> tuple[float, list[torch.Tensor]]:
        model = wrapped(group, mlp().float())
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step, batch in enumerate(data):
            optimizer.zero_grad()
            loss = loss_of(model, part(batch, group))
            if step == 1 and group.rank == overflowing:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), [parameter.detach() for parameter in model.parameters()]

    (scale, first), (other_scale, second) = on_ranks(2, rank)
    assert scale == other_scale == (2.0**11 if overflowing is None else 2.0**9)
    for a, b in zip(first, second, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)
