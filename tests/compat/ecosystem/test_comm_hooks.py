"""torch's communication hooks for DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from .compare import World, same_as_gloo
from .models import batch, mlp, train

SEVERAL = 0.0005  # megabytes: a cap that gives the small model several buckets


def with_hook(world: World, hook: Callable[..., Any], state: Any = None, cap: float = SEVERAL) -> Any:
    model = DDP(mlp(), process_group=world.group, bucket_cap_mb=cap)
    model.register_comm_hook(state, hook)
    return train(model, world, 4)


def power_sgd(world: World, **options: Any) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        world.group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5, **options
    )


def all_reduce(world: World) -> Any:
    return with_hook(world, default_hooks.allreduce_hook, world.group)


def noop(world: World) -> Any:
    return with_hook(world, debugging_hooks.noop_hook)


def halves(world: World, parameters: list[torch.Tensor]) -> Any:
    """Gloo rounds halves after each of several sums, shoal once: with four ranks only shapes agree."""
    return parameters if world.size == 2 else [p.shape for p in parameters]


def half_precision(world: World) -> Any:
    return halves(world, with_hook(world, default_hooks.fp16_compress_hook, world.group))


def all_reduce_of_c(world: World) -> Any:
    model = DDP(mlp(), process_group=world.group, bucket_cap_mb=0.0005)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return train(model, world)


def local_steps(world: World) -> Any:
    """Gradients go through the group for two steps, through half of it after that."""
    half = max(world.size // 2, 1)
    subgroup, _ = dist.new_subgroups(half)
    state = post_localSGD_hook.PostLocalSGDState(world.group, subgroup, start_localSGD_iter=2)
    return with_hook(world, post_localSGD_hook.post_localSGD_hook, state)


# Gloo deadlocks when hooks wait for collectives in the callbacks of several buckets: its two threads wait for
# what they themselves should do.  So all these have one.


def low_rank(world: World) -> Any:
    return with_hook(world, powerSGD_hook.powerSGD_hook, power_sgd(world), cap=25)


def low_rank_in_batches(world: World) -> Any:
    state = power_sgd(world, batch_tensors_with_same_shape=True, use_error_feedback=False, warm_start=False)
    return with_hook(world, powerSGD_hook.powerSGD_hook, state, cap=25)


def low_rank_in_half_precision(world: World) -> Any:
    hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    return halves(world, with_hook(world, hook, power_sgd(world), cap=25))


def a_hook_that_asks_twice(world: World) -> Any:
    """Collectives inside a callback, as PowerSGD's, and of more than one kind."""

    def hook(_, bucket):  # torch reads annotations, and would refuse a string
        first = dist.all_reduce(bucket.buffer(), group=world.group, async_op=True).get_future()

        def second(done: torch.futures.Future[Any]) -> torch.Tensor:
            tensor = done.value()[0]
            largest = tensor.abs().max()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=world.group)
            return tensor.div_(largest.clamp(min=1.0))

        return first.then(second)

    return with_hook(world, hook, cap=25)


def an_optimizer_in_the_hook(world: World) -> Any:
    from torch.distributed.optim.functional_sgd import _FunctionalSGD

    model = DDP(mlp(), process_group=world.group)
    state = optimizer_overlap_hooks._OptimizerHookState(_FunctionalSGD(list(model.parameters()), lr=0.1))
    model.register_comm_hook(
        world.group, optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    )
    for step in range(3):
        model.zero_grad()
        model(batch(world, step)).square().mean().backward()
    return list(model.parameters())


CASES = [
    all_reduce, noop, half_precision, low_rank_in_half_precision, all_reduce_of_c, low_rank,
    low_rank_in_batches, local_steps, a_hook_that_asks_twice, an_optimizer_in_the_hook,
]  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_hook_does_as_over_gloo(ranks, size, case):
    same_as_gloo(ranks(size), case)
