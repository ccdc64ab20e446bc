"""What a training loop may do around forward and backward, and what the gradients are then."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shoal
from tests.parallel.models import (
    Batch,
    alone,
    assert_gradients,
    batches,
    gradients,
    loss_of,
    mlp,
    on_ranks,
    part,
    wrapped,
)

# -- several forward and backward passes ---------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_graphs_that_are_alive_together_are_reduced_in_any_order(order: tuple[int, ...]) -> None:
    data = batches(3)

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group)
        for _ in range(2):
            model.zero_grad()
            losses = [loss_of(model, part(batch, group)) for batch in data]
            for number in order:
                losses[number].backward()
            assert_gradients(model, alone(*data))

    on_ranks(2, rank)


def test_forward_passes_without_backward_leave_no_trace() -> None:
    data = batches(3)

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group)
        for batch in data:
            model.zero_grad()
            loss_of(model, part(data[0], group))
            kept = loss_of(model, part(data[1], group))
            loss_of(model, part(batch, group)).backward()
            assert_gradients(model, alone(batch))
            del kept

    on_ranks(2, rank)


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode", "no_sync"])
def test_a_forward_pass_for_another_purpose_may_stand_between_forward_and_backward(mode: str) -> None:
    data = batches(2)

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group)
        for _ in range(3):
            model.zero_grad()
            loss = loss_of(model, part(data[0], group))
            if group.rank == 0:  # and on some ranks only
                if mode == "eval":
                    model.eval()
                    loss_of(model, data[1])
                    model.train()
                else:
                    context = {
                        "no_grad": torch.no_grad,
                        "inference_mode": torch.inference_mode,
                        "no_sync": model.no_sync,
                    }[mode]
                    with context():
                        loss_of(model, data[1])
            loss.backward()
            assert_gradients(model, alone(data[0]))

    on_ranks(2, rank)


def test_a_graph_that_is_kept_may_be_gone_through_twice() -> None:
    (batch,) = batches(1)

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group)
        loss = loss_of(model, part(batch, group))
        loss.backward(retain_graph=True)
        assert_gradients(model, alone(batch))
        loss.backward()
        assert_gradients(model, alone(batch, batch))

    on_ranks(2, rank)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_zeroed_between_forward_and_backward(set_to_none: bool) -> None:
    data = batches(3)

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group)
        for batch in data:
            loss = loss_of(model, part(batch, group))
            model.zero_grad(set_to_none=set_to_none)
            loss.backward()
            assert_gradients(model, alone(batch))

    on_ranks(2, rank)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_of_changing_length_reduces_the_sum(set_to_none: bool) -> None:
    data = batches(3)

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group)
        for count in (0, 2, 1, 0, 2):
            model.zero_grad(set_to_none=set_to_none)
            with model.no_sync():
                for batch in data[:count]:
                    loss_of(model, part(batch, group)).backward()
            loss_of(model, part(data[2], group)).backward()
            assert_gradients(model, alone(*data[:count], data[2]))

    on_ranks(2, rank)


def test_gradients_of_parameters_by_autograd_grad_are_local() -> None:
    data = batches(2)

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group)
        mine = mlp()
        loss_of(mine, part(data[0], group)).backward()
        for _ in range(2):
            local = torch.autograd.grad(loss_of(model, part(data[0], group)), list(model.parameters()))
            torch.testing.assert_close(list(local), gradients(mine))
            model.zero_grad()
            loss_of(model, part(data[1], group)).backward()
            assert_gradients(model, alone(data[1]))

    on_ranks(2, rank)


def test_backward_may_run_in_another_thread() -> None:
    data = batches(3)

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group)
        for batch in data:
            model.zero_grad()
            loss = loss_of(model, part(batch, group))
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            assert_gradients(model, alone(batch))

    on_ranks(2, rank)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_delayed_gradients_are_reduced_all_the_same(set_to_none: bool) -> None:
    data = batches(3)

    def rank(group: shoal.ProcessGroup) -> None:
        module = mlp()
        late = [(name, parameter) for name, parameter in module.named_parameters() if name[0] in "57"]
        model = wrapped(
            group, module, delay_all_reduce_named_params=late, param_to_hook_all_reduce=module[0].weight
        )
        for batch in data:
            model.zero_grad(set_to_none=set_to_none)
            with model.no_sync():
                loss_of(model, part(batch, group)).backward()
            loss_of(model, part(batch, group)).backward()
            assert_gradients(model, alone(batch, batch))

    on_ranks(2, rank)


# -- exceptions -----------------------------------------------------------------------------------


class _Stumble(Exception):
    pass


def _stumble(*_: object) -> None:
    raise _Stumble


def _in_forward(model: nn.Module, batch: Batch) -> None:
    handle = model.module[4].register_forward_hook(_stumble)
    try:
        loss_of(model, batch).backward()
    finally:
        handle.remove()


def _in_the_loss(model: nn.Module, batch: Batch) -> None:
    loss_of(model, batch)
    raise _Stumble


def _in_a_hook_of_a_gradient(model: nn.Module, batch: Batch) -> None:
    handle = model.module[3].weight.register_hook(_stumble)
    try:
        loss_of(model, batch).backward()
    finally:
        handle.remove()


def _in_a_hook_after_accumulation(model: nn.Module, batch: Batch) -> None:
    handle = model.module[3].weight.register_post_accumulate_grad_hook(_stumble)
    try:
        loss_of(model, batch).backward()
    finally:
        handle.remove()


def _in_a_hook_of_a_module(model: nn.Module, batch: Batch) -> None:
    handle = model.module[3].register_full_backward_hook(_stumble)
    try:
        loss_of(model, batch).backward()
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "accident",
    [
        _in_forward,
        _in_the_loss,
        _in_a_hook_of_a_gradient,
        _in_a_hook_after_accumulation,
        _in_a_hook_of_a_module,
    ],
)
@pytest.mark.parametrize("when", [0, 2])
def test_training_goes_on_after_an_exception(accident: Callable[[nn.Module, Batch], None], when: int) -> None:
    data = batches(3)

    def rank(group: shoal.ProcessGroup) -> None:
        model = wrapped(group)
        for batch in data[:when]:
            model.zero_grad()
            loss_of(model, part(batch, group)).backward()
        with pytest.raises(_Stumble):
            accident(model, part(data[2], group))
        for batch in data:
            model.zero_grad()
            loss_of(model, part(batch, group)).backward()
            assert_gradients(model, alone(batch))

    on_ranks(2, rank)
