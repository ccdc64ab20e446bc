"""What torch builds on torch.distributed and Gloo cannot run, against another way to the same result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from .compare import World, on_shoal
from .models import batch, mlp, train


def everywhere_alike(world: World, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        of_all = [torch.empty_like(tensor) for _ in range(world.size)]
        dist.all_gather(of_all, tensor.detach())
        assert all(torch.equal(tensor, other) for other in of_all)


def several_buckets(world: World, hook: Any, state: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DDP(mlp(), process_group=world.group, bucket_cap_mb=0.0005)
    if hook:
        model.register_comm_hook(state, hook)
    return train(model, world, 4)


def power_sgd(world: World) -> Any:
    state = powerSGD_hook.PowerSGDState(
        world.group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    parameters = several_buckets(world, powerSGD_hook.powerSGD_hook, state)
    everywhere_alike(world, parameters)
    return parameters


@pytest.mark.parametrize("size", [2, 4])
def test_power_sgd_with_several_buckets(ranks, size):
    """Over Gloo it hangs: its two threads wait in callbacks for what only they could do."""
    first, second = (ranks(size).run(on_shoal, power_sgd) for _ in range(2))
    for one, other in zip(first[0], second[0], strict=True):
        assert torch.equal(one, other)


def stepped_in_hook(world: World, hook: Any) -> None:
    def trained(overlap: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = DDP(mlp(), process_group=world.group, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=world.group, lr=0.1, overlap_with_ddp=overlap
        )
        if overlap:
            model.register_comm_hook(None, hook(default_hooks.allreduce_hook, model, optimizer))
        # The first two passes with the hook only find out the order of the buckets.
        for step in ([0, 0] if overlap else []) + [1, 2, 3]:
            model.zero_grad()
            model(batch(world, step)).square().mean().backward()
            if not overlap:
                optimizer.step()
        return list(model.parameters())

    for in_hook, after in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(in_hook, after)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "hook", [ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved]
)
def test_zero_steps_inside_the_hook(ranks, size, hook):
    """torch refuses this over Gloo, where it may hang."""
    ranks(size).run(on_shoal, stepped_in_hook, hook)


def exchanged(world: World) -> None:
    """Rank r sends r + 1 rows of t + 1 numbers to rank t."""
    parts = [
        torch.full((world.rank + 1, to + 1), float(world.rank), requires_grad=True)
        for to in range(world.size)
    ]
    outputs = [torch.empty(source + 1, world.rank + 1) for source in range(world.size)]
    received = collectives.all_to_all(outputs, parts)
    for source, part in enumerate(received):
        assert torch.equal(part, torch.full((source + 1, world.rank + 1), float(source)))
    sum((world.rank + 1) * part.sum() for part in received).backward()
    for to, part in enumerate(parts):
        assert torch.equal(part.grad, torch.full_like(part, to + 1.0))


@pytest.mark.parametrize("size", [2, 4])
def test_all_to_all_of_different_shapes_and_its_gradients(ranks, size):
    """Over Gloo torch does it by scattering, which takes one shape."""
    ranks(size).run(on_shoal, exchanged)


def divided(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    net = mlp()

    def gradients(scaled: bool) -> list[torch.Tensor]:
        model = fully_shard(copy.deepcopy(net), mesh=mesh)
        if scaled:
            model.set_gradient_divide_factor(2.0 * world.size)
        model(batch(world, 0)).square().mean().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    for half, whole in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(2 * half, whole)


@pytest.mark.parametrize("size", [2, 4])
def test_fsdp_with_a_divisor_of_ones_own(ranks, size):
    """torch uses PREMUL_SUM for it, which Gloo does not have."""
    ranks(size).run(on_shoal, divided)
