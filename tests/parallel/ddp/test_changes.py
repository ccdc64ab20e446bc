"""What is done to a wrapped module, its parameters and their gradients between the steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shoal
from shoal.testing import run_threads
from tests.parallel.models import Batch, batches, fixed, loss_of, mlp, part
from tests.parallel.training import (
    assert_close,
    assert_gradients,
    assert_reduces,
    assert_same_bits,
    gradients,
    on_ranks,
    sgd,
    simulated,
    steps,
    train,
    values,
    wrapped,
)


@on_ranks(2)
def test_a_copy_of_the_module_is_independent(group: shoal.ProcessGroup) -> None:
    data = batches(2)
    model = wrapped(group)
    loss_of(model, part(data[0], group)).backward()
    twin = copy.deepcopy(model.module)
    if group.rank == 0:  # would hang if it communicated
        twin.zero_grad()
        loss_of(twin, data[1]).backward()
        assert_gradients(twin, data[1])
    assert_gradients(model, data[0])
    assert_reduces(model, group, data[1:])


def test_training_goes_on_from_a_state_dict() -> None:
    data = batches(6)

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, some: list[Batch]) -> None:
        for batch in some:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    @on_ranks(2)
    def resumed(group: shoal.ProcessGroup) -> None:
        mine = [part(batch, group) for batch in data]
        first = wrapped(group)
        optimizer = sgd(first)
        trained(first, optimizer, mine[:3])
        saved = copy.deepcopy({"model": first.module.state_dict(), "optimizer": optimizer.state_dict()})
        second = wrapped(group, nn.Sequential(*(copy.deepcopy(layer) for layer in mlp())))
        trained(second, sgd(second), mine[4:])  # training of its own, which loading undoes
        second.module.load_state_dict(saved["model"])
        optimizer = sgd(second)
        optimizer.load_state_dict(saved["optimizer"])
        trained(second, optimizer, mine[3:])
        assert_close(values(second), values(train(mlp(), data)))

    resumed()


@on_ranks(2)
def test_layers_frozen_and_thawed_between_steps_get_gradients_again(group: shoal.ProcessGroup) -> None:
    """Parameters that were trained when the model was wrapped may be frozen where unused ones are allowed."""
    data = batches(5)
    model = wrapped(group, find_unused_parameters=True)
    plain = mlp()
    for step, batch in enumerate(data):
        for each in (model.module, plain):
            each.zero_grad()
            each[3].requires_grad_(step % 2 == 0)
        loss_of(model, part(batch, group)).backward()
        loss_of(plain, batch).backward()
        assert_close(gradients(model), gradients(plain))


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@on_ranks(2)
def test_a_module_whose_memory_changes_is_still_reduced(group: shoal.ProcessGroup) -> None:
    """``Module.to`` exchanges the memory of gradients behind the tensors that were there before."""
    model = wrapped(group, fixed(nn.Conv2d(2, 3, 3, bias=False)))
    x = torch.full((1, 2, 3, 3), float(group.rank))
    for layout in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        model.to(memory_format=layout)
        for set_to_none in (False, True):
            model.zero_grad(set_to_none=set_to_none)
            model(x).sum().backward()
            assert set(model.module.weight.grad.flatten().tolist()) == {0.5}


@on_ranks(2)
def test_copied_gradients_that_are_kept_are_not_overwritten(group: shoal.ProcessGroup) -> None:
    data = batches(3)
    model = wrapped(group, gradient_as_bucket_view=False)
    kept = []
    for batch in data:
        model.zero_grad()
        loss_of(model, part(batch, group)).backward()
        kept.append([parameter.grad for parameter in model.parameters()])
    for held, batch in zip(kept, data, strict=True):
        assert_close(held, simulated(steps([batch]), size=1)[0][0])


@on_ranks(2)
def test_gradients_that_the_user_replaces_are_reduced_with_the_next_pass(group: shoal.ProcessGroup) -> None:
    """Accumulation continues from whatever ``grad`` holds, if it is the same on all ranks."""
    data = batches(2)
    model = wrapped(group)
    loss_of(model, part(data[0], group)).backward()
    for parameter in model.parameters():
        parameter.grad = 2 * parameter.grad
    loss_of(model, part(data[1], group)).backward()
    assert_gradients(model, data[0], data[0], data[1])


@pytest.mark.parametrize("overflowing", [None, 1])
def test_a_gradient_scaler_decides_the_same_on_all_ranks(overflowing: int | None) -> None:
    data = batches(3, dtype=torch.float32)

    def rank(group: shoal.ProcessGroup) -> tuple[float, list[torch.Tensor]]:
        model = wrapped(group, mlp(torch.float32))
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
        return scaler.get_scale(), values(model)

    (scale, first), (other_scale, second) = run_threads(rank, 2)
    assert scale == other_scale == (2.0**11 if overflowing is None else 2.0**9)
    assert all(parameter.isfinite().all() for parameter in first)
    assert_same_bits(first, second)
