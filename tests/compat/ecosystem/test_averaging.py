"""torch's model averagers and the optimizer over them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import averagers, utils
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from .compare import World, same_as_gloo
from .models import batch, mlp, train


def local_training(world: World, averager: Any, steps: int = 5) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(world, step)).square().mean().backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    return list(model.parameters())


def periodic(world: World) -> Any:
    return local_training(world, averagers.PeriodicModelAverager(period=2, warmup_steps=1))


def periodic_in_a_group(world: World) -> Any:
    return local_training(world, averagers.PeriodicModelAverager(period=2, process_group=world.group))


def hierarchical(world: World) -> Any:
    """Four ranks: pairs average every step, all ranks every second one."""
    periods = OrderedDict([(1, 2), (2, 4)] if world.size == 4 else [(2, 2)])
    return local_training(world, HierarchicalModelAverager(period_group_size_dict=periods))


def of_the_optimizer(world: World) -> Any:
    model = mlp()
    local = torch.optim.SGD(model.parameters(), 0.1)
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=1)
    optimizer = PostLocalSGDOptimizer(local, averager)
    parameters = train(model, world, 5, optimizer)
    return parameters, optimizer.state_dict()["step"]


def averaged_at_once(world: World) -> Any:
    torch.manual_seed(world.rank)
    model = mlp()
    utils.average_parameters(model.parameters(), dist.group.WORLD)
    return list(model.parameters())


CASES = [periodic, periodic_in_a_group, hierarchical, of_the_optimizer, averaged_at_once]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_an_averager_does_as_over_gloo(ranks, size, case):
    same_as_gloo(ranks(size), case)
