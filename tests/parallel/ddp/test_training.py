"""Training on several ranks equals training in one process with the whole batch, whatever the loop does.

What depends on the model (shared and checkpointed layers, several dtypes, memory layouts) is in ``equality``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from tests.parallel.models import Batch, Checkpointed, batches, fixed, loss_of, mlp, part
from tests.parallel.training import (
    assert_as_simulated,
    assert_close,
    assert_gradients,
    assert_reduces,
    gradients,
    on_ranks,
    sgd,
    simulated,
    steps,
    train,
    values,
    wrapped,
)


def test_the_simulation_of_ranks_trains_as_one_process_with_the_whole_batch() -> None:
    data = batches(5)
    assert_close(simulated(steps(data), mlp, 3)[1], values(train(mlp(), data)))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    ("size", "ranks", "options"),
    [
        (1, {}, {}),
        (2, {}, {"bucket_cap_mb": 25}),
        (3, {"hosts": ["a", "b", "c"]}, {}),
        (3, {"hosts": ["a", "a", "b"]}, {}),
        (3, {"concurrency": 4}, {}),
    ],
    ids=["alone", "one bucket", "between hosts", "within and between hosts", "four lanes"],
)
def test_a_perceptron_trains_as_in_one_process(
    size: int, ranks: Any, options: Any, set_to_none: bool
) -> None:
    assert_as_simulated(steps(batches(4), set_to_none=set_to_none), size, ranks=ranks, **options)


def test_all_ranks_have_the_same_bits_in_single_precision() -> None:
    assert_as_simulated(steps(batches(4, dtype=torch.float32)), 3, make=lambda: mlp(torch.float32))


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_the_wrapper_may_be_checkpointed_as_a_whole(group: shoal.ProcessGroup, reentrant: bool) -> None:
    own = mlp()
    model = Checkpointed(wrapped(group, own), reentrant)
    for x, y in batches(3):
        own.zero_grad()
        loss_of(model, part((x.requires_grad_(), y), group)).backward()
        assert_gradients(own, (x.detach(), y))


def test_gradient_penalties_by_autograd_grad_reduce_only_in_backward() -> None:
    def penalised(model: nn.Module, place: Any) -> Iterator[None]:
        x = part(batches(1)[0], place)[0].requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        ((out**2).mean() + (slope**2).mean()).backward()
        yield

    assert_as_simulated(penalised)


# -- several forward and backward passes ---------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@on_ranks(2)
def test_graphs_that_are_alive_together_are_reduced_in_any_order(
    group: shoal.ProcessGroup, order: tuple[int, ...]
) -> None:
    data = batches(3)
    model = wrapped(group)
    for _ in range(2):
        model.zero_grad()
        losses = [loss_of(model, part(batch, group)) for batch in data]
        for number in order:
            losses[number].backward()
        assert_gradients(model, *data)


@on_ranks(2)
def test_forward_passes_without_backward_leave_no_trace(group: shoal.ProcessGroup) -> None:
    data = batches(3)
    model = wrapped(group)
    for batch in data:
        loss_of(model, part(data[0], group))
        kept = loss_of(model, part(data[1], group))
        assert_reduces(model, group, [batch])
        del kept


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode", "no_sync"])
@on_ranks(2)
def test_a_forward_pass_for_another_purpose_may_stand_between_forward_and_backward(
    group: shoal.ProcessGroup, mode: str
) -> None:
    data = batches(2)
    model = wrapped(group)
    contexts = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "no_sync": model.no_sync,
    }
    for _ in range(3):
        model.zero_grad()
        loss = loss_of(model, part(data[0], group))
        if group.rank == 0:  # and on some ranks only
            model.train(mode != "eval")
            with contexts.get(mode, nullcontext)():
                loss_of(model, data[1])
            model.train()
        loss.backward()
        assert_gradients(model, data[0])


@on_ranks(2)
def test_a_graph_that_is_kept_may_be_gone_through_twice(group: shoal.ProcessGroup) -> None:
    (batch,) = batches(1)
    model = wrapped(group)
    loss = loss_of(model, part(batch, group))
    loss.backward(retain_graph=True)
    assert_gradients(model, batch)
    loss.backward()
    assert_gradients(model, batch, batch)


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_gradients_may_be_zeroed_between_forward_and_backward(
    group: shoal.ProcessGroup, set_to_none: bool
) -> None:
    model = wrapped(group)
    for batch in batches(3):
        loss = loss_of(model, part(batch, group))
        model.zero_grad(set_to_none=set_to_none)
        loss.backward()
        assert_gradients(model, batch)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("local", [True, False])
@on_ranks(2)
def test_accumulation_of_changing_length_reduces_the_sum(
    group: shoal.ProcessGroup, set_to_none: bool, local: bool
) -> None:
    """With and without ``no_sync``: without it every backward pass reduces, which only costs more."""
    data = batches(3)
    model = wrapped(group)
    for count in (0, 2, 1, 0, 2):
        model.zero_grad(set_to_none=set_to_none)
        with model.no_sync() if local else nullcontext():
            for batch in data[:count]:
                loss_of(model, part(batch, group)).backward()
        loss_of(model, part(data[2], group)).backward()
        assert_gradients(model, *data[:count], data[2])


@on_ranks(2)
def test_gradients_of_parameters_by_autograd_grad_are_local(group: shoal.ProcessGroup) -> None:
    data = batches(2)
    model = wrapped(group)
    mine = mlp()
    loss_of(mine, part(data[0], group)).backward()
    for _ in range(2):
        local = torch.autograd.grad(loss_of(model, part(data[0], group)), list(model.parameters()))
        assert_close(list(local), gradients(mine))
        assert_reduces(model, group, data[1:])


@on_ranks(2)
def test_backward_may_run_in_another_thread(group: shoal.ProcessGroup) -> None:
    model = wrapped(group)
    for batch in batches(3):
        model.zero_grad()
        thread = threading.Thread(target=loss_of(model, part(batch, group)).backward)
        thread.start()
        thread.join()
        assert_gradients(model, batch)


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_delayed_gradients_are_reduced_all_the_same(group: shoal.ProcessGroup, set_to_none: bool) -> None:
    module = mlp()
    late = [(name, parameter) for name, parameter in module.named_parameters() if name[0] in "57"]
    model = wrapped(
        group, module, delay_all_reduce_named_params=late, param_to_hook_all_reduce=module[0].weight
    )
    for batch in batches(3):
        model.zero_grad(set_to_none=set_to_none)
        with model.no_sync():
            loss_of(model, part(batch, group)).backward()
        loss_of(model, part(batch, group)).backward()
        assert_gradients(model, batch, batch)


# -- several models ---------------------------------------------------------------------------------


@on_ranks(2)
def test_two_models_on_one_group_train_against_each_other(group: shoal.ProcessGroup) -> None:
    """The pattern of adversarial networks: gradients for one model flow through the other."""

    def critic() -> nn.Module:
        return fixed(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double())

    def play(maker: nn.Module, judge: nn.Module, some: list[Batch]) -> list[Any]:
        making, judging = sgd(maker), sgd(judge)
        for noise, real in some:
            judging.zero_grad()
            made = maker(noise)
            ((judge(real) - 1) ** 2 + judge(made.detach()) ** 2).mean().backward()
            judging.step()
            making.zero_grad()
            ((judge(made) - 1) ** 2).mean().backward()
            making.step()
        return [*values(maker), *values(judge)]

    data = batches(4)
    parts = [part(batch, group) for batch in data]
    assert_close(play(wrapped(group), wrapped(group, critic()), parts), play(mlp(), critic(), data))


@on_ranks(2)
def test_two_models_in_one_backward_pass_are_both_reduced(group: shoal.ProcessGroup) -> None:
    one, two = wrapped(group), wrapped(group)
    for batch in batches(3):
        one.zero_grad()
        two.zero_grad()
        (loss_of(one, part(batch, group)) + 2 * loss_of(two, part(batch, group))).backward()
        assert_gradients(one, batch)
        assert_gradients(two, batch, factor=2)


@on_ranks(4)
def test_models_of_one_rank_may_belong_to_different_groups(group: shoal.ProcessGroup) -> None:
    (batch,) = batches(1)
    with group.split(group.rank % 2) as pair:
        inner, outer = wrapped(pair), wrapped(group)
        for _ in range(2):
            inner.zero_grad()
            outer.zero_grad()
            (loss_of(inner, part(batch, pair)) + loss_of(outer, part(batch, group))).backward()
            assert_gradients(inner, batch)
            assert_gradients(outer, batch)


@on_ranks(4)
def test_one_module_may_be_trained_in_two_groups_in_turn(group: shoal.ProcessGroup) -> None:
    with group.split(group.rank % 2) as pair:
        module = mlp()
        in_pair, in_all = wrapped(pair, module), wrapped(group, module)
        for batch in batches(3):
            assert_reduces(in_pair, pair, [batch])
            loss_of(in_all, part(batch, group)).backward()
            assert_gradients(module, batch, batch)


# -- exceptions -------------------------------------------------------------------------------------


class _Stumble(Exception):
    pass


def _stumble(*_: object) -> None:
    raise _Stumble


@pytest.mark.parametrize(
    "hooked",
    [
        lambda layers: layers[4].register_forward_hook,
        lambda layers: layers[3].weight.register_hook,
        lambda layers: layers[3].weight.register_post_accumulate_grad_hook,
        lambda layers: layers[3].register_full_backward_hook,
        None,
    ],
    ids=["in forward", "hook of a gradient", "after accumulation", "hook of a module", "in the loss"],
)
@pytest.mark.parametrize("when", [0, 2])
@on_ranks(2)
def test_training_goes_on_after_an_exception(
    group: shoal.ProcessGroup, hooked: Callable[[nn.Module], Any] | None, when: int
) -> None:
    data = batches(3)
    model = wrapped(group)
    assert_reduces(model, group, data[:when])
    handle = None if hooked is None else hooked(model.module)(_stumble)
    with pytest.raises(_Stumble):
        _stumble(loss_of(model, part(data[2], group)).backward() if handle else loss_of(model, data[2]))
    if handle is not None:
        handle.remove()
    assert_reduces(model, group, data)
