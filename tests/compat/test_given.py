"""What takes a group of shoal takes one of torch.distributed over "shoal", and refuses others in words."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal
import shoal.distributed
from shoal.parallel.averaging import average_parameters
from shoal.parallel.hooks import PowerSGDState, allreduce_hook
from shoal.testing import run_threads
from tests.support.stage import Stage

GLOO = "is a group of torch.distributed over the backend 'gloo', which shoal cannot use; make it with"


def _trained(group, net, rank):
    """The parameters after a step, trained by everything that takes a group."""
    model = shoal.DistributedDataParallel(net, group=group)
    model.register_comm_hook(group, allreduce_hook)
    optimizer = shoal.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, group=group, lr=0.1)
    with shoal.Join([model, optimizer]):
        for _ in range(rank + 1):
            model(torch.full((2, 3), float(rank))).sum().backward()
            optimizer.step()
    average_parameters(net.parameters(), group)
    averager = shoal.PeriodicModelAverager(2, group=group)
    averager.average_parameters(net.parameters())
    return model.group, [parameter.tolist() for parameter in net.parameters()]


def train(context):
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    world = context.group.group
    _, expected = _trained(world, copy.deepcopy(net), context.rank)
    pair = dist.new_group([1, 0])
    for given, stands_on in ((context.group, world), (None, world), (pair, pair.group)):
        used, values = _trained(given, copy.deepcopy(net), context.rank)
        assert used is stands_on
        assert values == expected
    alone = [dist.new_group([rank]) for rank in range(2)][context.rank]
    assert shoal.DistributedDataParallel(nn.Linear(1, 1), group=alone).group.size == 1
    x = torch.ones(1)
    shoal.distributed.all_reduce(x, group=context.group)
    shoal.distributed.all_reduce(x, group=pair)
    assert x.item() == 4
    assert shoal.distributed.get_rank(context.group) == context.rank


def test_a_group_of_torch_over_shoal_stands_for_its_own(ranks):
    ranks(2).run(train)


def refuse(context):
    net, gloo = nn.Linear(1, 1), context.gloo
    for take, words in {
        lambda g: shoal.DistributedDataParallel(net, group=g): "DistributedDataParallel: group ",
        lambda g: shoal.ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, group=g, lr=1.0): "Zero",
        lambda g: shoal.PeriodicModelAverager(2, group=g): "PeriodicModelAverager: group ",
        lambda g: average_parameters(net.parameters(), g): "average_parameters: group ",
        lambda g: PowerSGDState(g): "process_group ",
        lambda g: shoal.distributed.all_reduce(torch.ones(1), group=g): "all_reduce: group ",
    }.items():
        with pytest.raises(shoal.UsageError, match=GLOO) as caught:
            take(gloo)
        assert words in str(caught.value)
    other = dist.new_group([1 - context.rank], use_local_synchronization=False)
    dist.new_group([context.rank])
    with pytest.raises(shoal.UsageError, match="this rank is not a member of the group that was given"):
        shoal.DistributedDataParallel(net, group=other)
    model = shoal.DistributedDataParallel(net, group=context.group)
    model.register_comm_hook(gloo, allreduce_hook)
    with pytest.raises(shoal.UsageError, match=GLOO):
        model(torch.ones(1, 1)).sum().backward()


def test_a_group_over_gloo_is_refused_by_its_backend(ranks):
    ranks(2).run(refuse)


def test_the_default_group_may_be_of_several_devices(tmp_path):
    program = (
        "import torch, shoal, torch.distributed as dist\n"
        f"dist.init_process_group('cpu:shoal', store=dist.FileStore({str(tmp_path / 's')!r}, 1), rank=0,"
        " world_size=1)\n"
        "model = shoal.DistributedDataParallel(torch.nn.Linear(1, 1))\n"
        "assert model.group is dist.group.WORLD.group\n"
        "import shoal.distributed as own\n"
        "own.init_process_group()\n"
        "try: shoal.DistributedDataParallel(torch.nn.Linear(1, 1))\n"
        "except shoal.UsageError as error: print(error)\n"
        "dist.destroy_process_group()\n"
        "assert shoal.DistributedDataParallel(torch.nn.Linear(1, 1)).group is own.group.WORLD\n"
        "own.destroy_process_group()\n"
    )
    with contextlib.closing(Stage(tmp_path)) as stage:
        (ended,) = stage.ranks(stage.script(program, prelude=""), 1, lambda rank, size, port: {})
    assert ended.code == 0, ended
    assert "both torch.distributed and shoal.distributed have a default group here; name one" in ended.out


def test_without_a_default_group_the_error_says_how_to_get_one():
    with pytest.raises(shoal.UsageError, match=r"no default group of shoal; pass group=shoal.init"):
        shoal.DistributedDataParallel(nn.Linear(1, 1))

    def rank(group):
        with pytest.raises(shoal.UsageError, match=r"must be a shoal.ProcessGroup .*, got str: 'world'"):
            shoal.ZeroRedundancyOptimizer([torch.ones(1)], torch.optim.SGD, group="world", lr=1.0)

    run_threads(rank, 1)
