"""torch's fully_shard (FSDP2), alone and over a mesh, and FullyShardedDataParallel (FSDP1)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard

from .compare import World, same_as_gloo
from .models import batch, mlp, train


def line(world: World) -> DeviceMesh:
    return init_device_mesh("cpu", (world.size,), mesh_dim_names=("data",))


def sharded(world: World, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """Every layer a unit of its own; 16 rows of a layer divide by the ranks, and its 4 do as well."""
    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh or line(world), **options)
    return fully_shard(model, mesh=mesh or line(world), **options)


def shards(world: World) -> Any:
    return train(sharded(world), world)


def shards_without_a_mesh(world: World) -> Any:
    return train(fully_shard(mlp()), world)


def parameters_kept_after_forward(world: World) -> Any:
    return train(sharded(world, reshard_after_forward=False), world)


def uneven_shards(world: World) -> Any:
    """Five and three rows on two or four ranks: padding, and ranks without a row."""
    net = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
    return train(fully_shard(net, mesh=line(world)), world)


def half_precision(world: World) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(sharded(world, mp_policy=policy), world)


def half_precision_of_gradients(world: World) -> Any:
    """Gloo rounds halves after each of several sums, shoal once: with four ranks only shapes agree."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    parameters = train(sharded(world, mp_policy=policy), world)
    return parameters if world.size == 2 else [p.shape for p in parameters]


def gradients_of_two_passes(world: World) -> Any:
    model = sharded(world)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        model(batch(world, step)).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def clipped_gradients(world: World) -> Any:
    model = sharded(world)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        model(batch(world, step)).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).full_tensor())
        optimizer.step()
    return norms, list(model.parameters())


def a_full_state(world: World) -> Any:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    model = sharded(world)
    train(model, world)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    again = sharded(world)
    set_model_state_dict(again, full if world.rank == 0 else {}, options=options)
    return full, train(again, world)


def summed_gradients(world: World) -> Any:
    model = sharded(world)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(2.0 * world.size)
    return train(model, world)


def prefetching(world: World) -> Any:
    model = sharded(world)
    first, second, third = (layer for layer in model if isinstance(layer, nn.Linear))
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    return train(model, world)


def replicas_of_shards(world: World) -> Any:
    """HSDP: two replicas; of a shard each with two ranks, of two with four."""
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))
    return train(sharded(world, mesh), world)


def shards_of_columns(world: World) -> Any:
    return train(fully_shard(mlp(), mesh=line(world), shard_placement_fn=lambda p: Shard(p.ndim - 1)), world)


def gathered_ahead(world: World) -> Any:
    model = fully_shard(mlp(), mesh=line(world), reshard_after_forward=False)
    handle = model.unshard(async_op=True)
    assert handle is not None
    handle.wait()
    whole = [parameter.clone() for parameter in model.parameters()]
    model.reshard()
    return whole, train(model, world)


def scaled_gradients(world: World) -> Any:
    """An infinite loss on one rank makes all skip the step."""
    model = sharded(world)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    return scaled(world, model, optimizer, scaler)


def scaled(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> Any:
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(world, step)).square().mean()
        scaler.scale(loss * (float("inf") if step == 1 and world.rank == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, list(model.parameters())


def meta_device(world: World) -> Any:
    with torch.device("meta"):
        model = mlp()
    fully_shard(model, mesh=line(world))
    model.to_empty(device="cpu")
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.1 * (number + 1))
    return train(model, world)


def replicated(world: World) -> Any:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return train(replicate(mlp(), mesh=line(world)), world)


def fsdp1(world: World, **options: Any) -> FSDP:
    policy = ModuleWrapPolicy({nn.Linear})
    return FSDP(
        mlp(), process_group=world.group, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options
    )


def full_shards_of_fsdp1(world: World) -> Any:
    return train(fsdp1(world), world)


def gradient_shards_of_fsdp1(world: World) -> Any:
    return train(fsdp1(world, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True), world)


def no_shards_of_fsdp1(world: World) -> Any:
    return train(fsdp1(world, sharding_strategy=ShardingStrategy.NO_SHARD), world)


def half_precision_of_fsdp1(world: World) -> Any:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(fsdp1(world, mixed_precision=precision), world)


def scaled_gradients_of_fsdp1(world: World) -> Any:
    model = fsdp1(world)
    scaler = ShardedGradScaler("cpu", init_scale=64.0, growth_interval=1, process_group=world.group)
    return scaled(world, model, torch.optim.SGD(model.parameters(), 0.1), scaler)


def clipping_and_state_of_fsdp1(world: World) -> Any:
    model = fsdp1(world)
    # A large epsilon: where gradients are next to nothing, Adam would make much of their rounding.
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    model(batch(world, 0)).square().mean().backward()
    norm = model.clip_grad_norm_(0.05)
    optimizer.step()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return norm, model.state_dict(), FSDP.optim_state_dict(model, optimizer)


CASES = [
    shards, shards_without_a_mesh, parameters_kept_after_forward, uneven_shards, half_precision,
    half_precision_of_gradients, gradients_of_two_passes, clipped_gradients, a_full_state,
    summed_gradients, prefetching, replicas_of_shards, shards_of_columns, gathered_ahead,
    scaled_gradients, scaled_gradients_of_fsdp1, meta_device, replicated, full_shards_of_fsdp1,
    gradient_shards_of_fsdp1, no_shards_of_fsdp1, half_precision_of_fsdp1, clipping_and_state_of_fsdp1,
]  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_sharded_training_is_that_over_gloo(ranks, size, case):
    # FSDP1 takes norms in float32 and refuses wider gradients.
    single = case is clipping_and_state_of_fsdp1
    same_as_gloo(ranks(size), case, torch.float32 if single else torch.float64)
