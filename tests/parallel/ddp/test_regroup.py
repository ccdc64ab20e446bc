"""DistributedDataParallel goes on over another group, whatever was under way in the one before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal import DistributedDataParallel, MixedPrecision, ProcessGroup, UsageError
from shoal.parallel.hooks import PowerSGDState, bf16_compress_hook, powerSGD_hook
from tests.parallel.models import Normed, batches, loss_of, mlp
from tests.parallel.training import SMALL_MB, on_ranks


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@on_ranks(2)
def test_a_model_can_be_wrapped_anew_while_its_wrapper_over_an_ended_group_lives(group: ProcessGroup) -> None:
    net, data = mlp(), batches(8)
    pair = group.subgroup([0, 1])
    older = DistributedDataParallel(net, group=pair, bucket_cap_mb=SMALL_MB)
    parameters = list(net.parameters())

    def interrupt(_: torch.Tensor) -> None:
        raise Interrupted

    handle = parameters[0].register_hook(interrupt)
    with pytest.raises(Interrupted):
        loss_of(older, data[group.rank]).backward()
    handle.remove()
    pair.close()
    net.zero_grad()
    model = DistributedDataParallel(net, group=group, bucket_cap_mb=SMALL_MB)
    for batch in (data[group.rank], data[2 + group.rank]):
        net.zero_grad()
        loss_of(model, batch).backward()
    averages = gradients(net)
    alone = mlp()
    for batch in data[2:4]:
        (loss_of(alone, batch) / 2).backward()
    for average, expected in zip(averages, gradients(alone), strict=True):
        torch.testing.assert_close(average, expected)
    assert older.module is net


class Interrupted(Exception):
    """Raised in a backward pass."""


@pytest.mark.parametrize("moment", ["between passes", "in a pass", "before the first pass"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": False},
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    ],
)
@on_ranks(3)
def test_averages_are_those_of_the_new_group(
    group: ProcessGroup, moment: str, options: dict[str, Any]
) -> None:
    """Two of three ranks go on, and average as a model does that is wrapped anew."""
    data = batches(8)
    model = DistributedDataParallel(mlp(), group=group, bucket_cap_mb=SMALL_MB, **options)
    if moment != "before the first pass":
        loss_of(model, data[group.rank]).backward()
    if moment == "in a pass":

        def interrupt(_: torch.Tensor) -> None:
            raise Interrupted

        def interrupted(layer: nn.Module, _: Any, output: torch.Tensor) -> None:
            output.register_hook(interrupt)

        handle = model.module[3].register_forward_hook(interrupted)
        with pytest.raises(Interrupted):
            loss_of(model, data[group.rank]).backward()
        handle.remove()
    group.store.set(f"here/{group.rank}", b"")
    group.store.wait([f"here/{rank}" for rank in range(3)])
    if group.rank == 1:
        return
    with group.subgroup([2, 0]) as pair:
        net = mlp()
        for parameter in [*model.parameters(), *net.parameters()]:
            parameter.data.mul_(0.5)  # between passes, and torch does not see it
        model.regroup(pair)
        assert model.group is pair
        plain = DistributedDataParallel(net, group=pair, bucket_cap_mb=SMALL_MB, **options)
        for step in range(3):  # the order of gradients is learnt in the first one
            for each in (model, plain):
                each.zero_grad()
                loss_of(each, data[step + pair.rank]).backward()
            assert all(map(torch.equal, gradients(model), gradients(plain)))
            with torch.no_grad():
                for each in (model, plain):
                    for parameter in each.parameters():
                        parameter.sub_(0.1 * parameter.grad)


@on_ranks(2)
def test_gradients_stay_and_no_hook_of_the_group_before_is_left(group: ProcessGroup) -> None:
    net = mlp()
    model = DistributedDataParallel(net, group=group)
    loss_of(model, batches(8)[group.rank]).backward()
    before = gradients(model)
    old = {parameter.grad.data_ptr() for parameter in net.parameters() if parameter.grad is not None}
    count = len(next(net.parameters())._post_accumulate_grad_hooks or ())
    kept = model._reducer  # as the traceback of an error in it does
    with group.subgroup([0, 1]) as pair:
        model.regroup(pair)
        assert model._reducer is not kept
        assert all(map(torch.equal, gradients(model), before))
        now = {parameter.grad.data_ptr() for parameter in net.parameters() if parameter.grad is not None}
        assert not old & now
        assert len(next(net.parameters())._post_accumulate_grad_hooks or ()) == count == 1


@on_ranks(2)
def test_buffers_are_those_of_the_new_rank_0(group: ProcessGroup) -> None:
    net = Normed().double()
    model = DistributedDataParallel(net, group=group)
    for number in range(3):
        loss_of(model, batches(8)[2 * number + group.rank]).backward()
    own = [buffer.clone() for buffer in net.buffers()]
    with group.subgroup([1, 0]) as pair:
        model.regroup(pair)
        expected = [buffer.clone() for buffer in own]
        for buffer in expected:
            pair.broadcast(buffer, root=0).wait()
        model.eval()
        model.train()
        model._before()
        assert all(map(torch.equal, net.buffers(), expected))


@on_ranks(2)
def test_a_hook_follows_unless_it_has_a_state(group: ProcessGroup) -> None:
    data = batches(8)[group.rank]
    with group.subgroup([1, 0]) as pair:
        model = DistributedDataParallel(mlp(), group=group)
        model.register_comm_hook(None, bf16_compress_hook)
        model.check_regroup()
        model.regroup(pair)
        loss_of(model, data).backward()
        fresh = DistributedDataParallel(mlp(), group=pair)
        fresh.register_comm_hook(None, bf16_compress_hook)
        loss_of(fresh, data).backward()
        assert all(map(torch.equal, gradients(model), gradients(fresh)))
        other = DistributedDataParallel(mlp(), group=group)
        other.register_comm_hook(PowerSGDState(None), powerSGD_hook)
        with pytest.raises(UsageError, match="the state of its communication hook, a PowerSGDState"):
            other.regroup(pair)
        carrying = mlp()
        for parameter in carrying.parameters():
            parameter._in_backward_optimizers = []  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="optimisers that run in backward"):
            DistributedDataParallel(carrying, group=group).check_regroup()
