"""Smaller things of torch that communicate: state dictionaries, samplers, sharded tensors, transports."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _state_dict_utils, collective_utils
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint._pg_transport import PGTransport
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler

from tests.support import releases

from .compare import World, same_as_gloo
from .models import mlp, train


def a_sampler(world: World) -> Any:
    data = torch.arange(11.0)
    sampler = DistributedSampler(data, seed=3)
    sampler.set_epoch(2)
    return list(DataLoader(data, batch_size=2, sampler=sampler))


def values_of_functions(world: World) -> Any:
    """What one rank computes, or each, all know; and an error too."""

    def fail() -> None:
        raise ValueError("not today")

    try:
        collective_utils.broadcast(fail if world.rank == 0 else None, rank=0, pg=world.group)
    except RuntimeError as error:
        text = str(error).splitlines()[0]
    one = collective_utils.broadcast((lambda: {"a": 1}) if world.rank == 0 else None, rank=0, pg=world.group)
    every = collective_utils.all_gather(lambda: world.rank**2, pg=world.group)
    objects: list[int] = [-1] * world.size
    collective_utils.all_gather_object_enforce_type(world.group, objects, world.rank)
    return text, one, every, objects


def generators_compared(world: World) -> Any:
    generator = torch.Generator().manual_seed(1)
    same = collective_utils._check_rng_sync(generator, world.group)
    generator.manual_seed(world.rank)
    other = collective_utils._check_rng_sync(generator, world.group)
    return same, other is not None


def state_dictionaries(world: World) -> Any:
    mesh = init_device_mesh("cpu", (world.size,))
    whole = {"a": torch.arange(10.0).reshape(5, 2), "b": 3, "c": torch.ones(4)}
    parts = {"a": distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)]), "b": 0, "c": torch.zeros(4)}
    _state_dict_utils._broadcast_state_dict(whole, parts, torch.device("cpu"), pg=world.group)
    return list(parts.values()), list(_state_dict_utils._gather_state_dict(parts).values())


def a_transport(world: World) -> Any:
    """The first rank's state to a rank that has lost its own."""
    transport = PGTransport(world.group, datetime.timedelta(seconds=30), torch.device("cpu"))
    last = world.size - 1
    state = {"step": 3, "model": mlp().state_dict(), "x": torch.arange(5)}
    if world.rank == 0:
        transport.send_checkpoint([last], state)
    if world.rank == last:
        state = transport.recv_checkpoint(0)
    return state["step"], list(state["model"].values()), state["x"]


def a_sharded_tensor(world: World) -> Any:
    placements = [f"rank:{rank}/cpu" for rank in range(world.size)]
    x = sharded_tensor.full(ChunkShardingSpec(dim=0, placements=placements), (7, 3), fill_value=2.0)
    for shard in x.local_shards():
        shard.tensor.add_(world.rank)
    whole = torch.empty(7, 3) if world.rank == 0 else None
    x.gather(dst=0, out=whole)
    return [shard.tensor for shard in x.local_shards()], whole, x.metadata().size


def shards_in_memory_of_the_group(world: World) -> Any:
    model = fully_shard(mlp(), mesh=init_device_mesh("cpu", (world.size,)))
    model.set_allocate_memory_from_process_group_for_comm(True)
    return train(model, world)


def a_hook_of_replicas(world: World) -> Any:
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(mlp(), mesh=mesh)
    seen: list[float] = []
    model.set_all_reduce_hook(lambda gradient: seen.append(gradient.numel()))
    return train(model, world), seen


def a_group_in_fsdp_of_its_own(world: World) -> Any:
    model = fully_shard(nn.Sequential(mlp(), nn.Linear(4, 4)), mesh=init_device_mesh("cpu", (world.size,)))
    model.set_separate_reduce_scatter_group(dist.new_group())
    return train(model, world)


CASES = [
    a_sampler, values_of_functions, generators_compared, state_dictionaries, a_transport,
    a_sharded_tensor, shards_in_memory_of_the_group, a_hook_of_replicas,
]  # fmt: skip
if releases.fsdp_has_reduce_scatter_group():
    CASES.append(a_group_in_fsdp_of_its_own)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_utility_does_as_over_gloo(ranks, size, case):
    same_as_gloo(ranks(size), case)
