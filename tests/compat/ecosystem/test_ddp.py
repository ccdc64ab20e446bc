"""torch's own DistributedDataParallel, whose reducer calls the backend from C++."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support import releases

from .compare import World, same_as_gloo
from .models import batch, mlp, train

STEPS = 3


def one_bucket(world: World) -> Any:
    return train(DDP(mlp(), process_group=world.group), world)


def several_buckets(world: World) -> Any:
    return train(DDP(mlp(), process_group=world.group, bucket_cap_mb=0.0005), world)


def gradients_in_the_bucket(world: World) -> Any:
    return train(
        DDP(mlp(), process_group=world.group, bucket_cap_mb=0.0005, gradient_as_bucket_view=True), world
    )


def static_graph(world: World) -> Any:
    return train(DDP(mlp(), process_group=world.group, static_graph=True, bucket_cap_mb=0.0005), world)


class Branches(nn.Module):
    """Ranks take different branches, and nobody the last."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
        self.branch = rank % 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.branches[self.branch](self.stem(x))
        return y


def unused_parameters(world: World) -> Any:
    model = DDP(Branches(world.rank), process_group=world.group, find_unused_parameters=True)
    return train(model, world)


def gradients_of_two_passes(world: World) -> Any:
    model = DDP(mlp(), process_group=world.group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        with model.no_sync() if step % 2 == 0 else contextlib.nullcontext():
            model(batch(world, step)).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def buffers_of_the_first_rank(world: World) -> Any:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    return train(DDP(net, process_group=world.group, **releases.sync_buffers()), world)


class Dtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8, dtype=torch.float64)
        self.narrow = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.short = nn.Linear(8, 8, dtype=torch.float16)
        self.usual = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.narrow(self.wide(x.double()).bfloat16())
        y: torch.Tensor = self.usual(self.short(x.half()).to(self.usual.weight.dtype))
        return y


def four_dtypes(world: World) -> Any:
    parameters = train(DDP(Dtypes(), process_group=world.group), world)
    # Gloo rounds halves after each of several sums, shoal once after all.
    return parameters if world.size == 2 else [p.shape for p in parameters]


def a_sparse_gradient(world: World) -> Any:
    net = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
    model = DDP(net, process_group=world.group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        words = (torch.arange(6).reshape(2, 3) * (world.rank + 1) + step) % 20
        model(words).square().mean().backward()
        optimizer.step()
    return list(model.parameters())


def parameters_of_the_first_rank(world: World) -> Any:
    torch.manual_seed(world.rank)
    return list(DDP(mlp(), process_group=world.group).parameters())


def a_late_parameter(world: World) -> Any:
    """In no bucket: reduced when the gradient of another parameter is there, and not waited for."""
    net = mlp()
    late, first = net[4].weight, net[0].weight
    model = DDP(
        net,
        process_group=world.group,
        delay_all_reduce_named_params=[("4.weight", late)],
        param_to_hook_all_reduce=first,
    )
    model(batch(world, 0)).square().mean().backward()
    dist.barrier()
    return [p.grad for p in net.parameters()]


def activation_checkpoints(world: World) -> Any:
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.net, x, use_reentrant=False)

    return train(DDP(Again(), process_group=world.group, bucket_cap_mb=0.0005), world)


def half_of_the_ranks(world: World) -> Any:
    """Two groups of their own, each with another model; groups of one where there are two ranks."""
    rank, size = world.rank, world.size
    half = size // 2
    groups = [dist.new_group(list(range(start, start + half))) for start in (0, half)]
    mine = groups[rank // half]
    torch.manual_seed(rank // half)
    return train(DDP(mlp(), process_group=mine), world)


def a_mesh(world: World) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world.size,))
    return train(DDP(mlp(), device_mesh=mesh), world)


def replicated(world: World) -> Any:
    from torch.distributed._composable.replicate import replicate

    return train(replicate(mlp(), process_group=world.group, bucket_cap_mb=0.0005), world)


def two_models_in_turn(world: World) -> Any:
    one, two = (DDP(mlp(), process_group=world.group) for _ in range(2))
    for step in range(STEPS):
        (one(batch(world, step)) - two(batch(world, step + 1))).square().mean().backward()
    return [p.grad for model in (one, two) for p in model.parameters()]


def parameters_broadcast_together(world: World) -> Any:
    tensors = [torch.full((n,), float(world.rank)) for n in (1, 300, 7)]
    dist._broadcast_coalesced(world.group, tensors, 256, world.size - 1)
    return tensors


def shapes_verified(world: World) -> Any:
    tensors = [torch.ones(2, 3), torch.ones(4)]
    dist._verify_params_across_processes(world.group, tensors)
    if world.rank == 1:
        tensors[1] = torch.ones(5)
    try:
        dist._verify_params_across_processes(world.group, tensors)
    except RuntimeError:
        return "raised"
    return "passed"


def with_all_checks(world: World) -> Any:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL, as far as it can be switched on later."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return several_buckets(world)
    finally:
        dist.set_debug_level(before)


CASES = [
    with_all_checks, one_bucket, several_buckets, gradients_in_the_bucket, static_graph,
    unused_parameters, gradients_of_two_passes, buffers_of_the_first_rank, four_dtypes,
    a_sparse_gradient, parameters_of_the_first_rank, a_late_parameter, activation_checkpoints,
    half_of_the_ranks, a_mesh, replicated, two_models_in_turn, parameters_broadcast_together,
    shapes_verified,
]  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_ddp_trains_as_over_gloo(ranks, size, case):
    same_as_gloo(ranks(size), case)
