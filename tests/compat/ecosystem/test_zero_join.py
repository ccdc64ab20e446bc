"""torch's ZeroRedundancyOptimizer, and its Join for ranks with different numbers of batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from .compare import World, same_as_gloo
from .models import batch, mlp, train


def zero(model: torch.nn.Module, world: World, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, process_group=world.group, lr=0.1, momentum=0.9, **options
    )


def sharded_steps(world: World) -> Any:
    model = DDP(mlp(), process_group=world.group)
    return train(model, world, optimizer=zero(model, world))


def sharded_steps_in_buckets(world: World) -> Any:
    model = DDP(mlp(), process_group=world.group)
    return train(model, world, optimizer=zero(model, world, parameters_as_bucket_view=True))


def a_state_saved_and_loaded(world: World) -> Any:
    model = DDP(mlp(), process_group=world.group)
    optimizer = zero(model, world)
    train(model, world, optimizer=optimizer)
    optimizer.consolidate_state_dict(to=1)
    kept = [optimizer.state_dict() if world.rank == 1 else None]
    dist.broadcast_object_list(kept, src=1)
    again = zero(model, world)
    again.load_state_dict(kept[0])
    return train(model, world, optimizer=again), kept[0]["state"]


def a_group_added_later(world: World) -> Any:
    model = DDP(mlp(), process_group=world.group)
    first, second = model.module[:2], model.module[2:]
    optimizer = zero(first, world)
    optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.01})
    return train(model, world, optimizer=optimizer)


def uneven(
    world: World, model: Any, optimizer: Any, *joinables: Joinable, **options: Any
) -> list[torch.Tensor]:
    """Rank r has 2 + r batches."""
    with Join(list(joinables), **options):
        for step in range(2 + world.rank):
            optimizer.zero_grad()
            model(batch(world, step)).square().mean().backward()
            optimizer.step()
    return list(model.parameters())


def uneven_ddp(world: World) -> Any:
    model = DDP(mlp(), process_group=world.group, bucket_cap_mb=0.0005)
    return uneven(world, model, torch.optim.SGD(model.parameters(), 0.1), model)


def uneven_ddp_divided_by_all(world: World) -> Any:
    model = DDP(mlp(), process_group=world.group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return uneven(world, model, optimizer, model, divide_by_initial_world_size=False)


def uneven_ddp_with_its_own_context(world: World) -> Any:
    model = DDP(mlp(), process_group=world.group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join():
        for step in range(4 - world.rank % 2):
            optimizer.zero_grad()
            model(batch(world, step)).square().mean().backward()
            optimizer.step()
    return list(model.parameters())


def uneven_ddp_and_zero(world: World) -> Any:
    """DDP speaks for both: torch's optimizer alone does not tell the others of its steps, and hangs."""
    model = DDP(mlp(), process_group=world.group)
    optimizer = zero(model, world)
    return uneven(world, model, optimizer, model, optimizer)


def an_early_end_that_raises(world: World) -> Any:
    model = DDP(mlp(), process_group=world.group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        uneven(world, model, optimizer, model, throw_on_early_termination=True)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return "no error"


class Counter(Joinable):
    """Counts everybody's iterations, as in torch's tutorial."""

    class Hook(JoinHook):
        def __init__(self, counter: Counter) -> None:
            self.counter = counter

        def main_hook(self) -> None:
            dist.all_reduce(torch.zeros(1), group=self.counter.join_process_group)

        def post_hook(self, is_last_joiner: bool) -> None:
            total = self.counter.total.clone() if is_last_joiner else torch.zeros(1)
            dist.all_reduce(total, op=dist.ReduceOp.MAX, group=self.counter.join_process_group)
            self.counter.total = total

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.total = world, torch.zeros(1)

    def __call__(self) -> None:
        Join.notify_join_context(self)
        one = torch.ones(1)
        dist.all_reduce(one, group=self.world.group)
        self.total += one

    def join_hook(self, **_: Any) -> JoinHook:
        return Counter.Hook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.world.group


def a_joinable_of_ones_own(world: World) -> Any:
    counter = Counter(world)
    with Join([counter]):
        for _ in range(2 + 3 * world.rank):
            counter()
    return counter.total


CASES = [
    sharded_steps, sharded_steps_in_buckets, a_state_saved_and_loaded, a_group_added_later, uneven_ddp,
    uneven_ddp_divided_by_all, uneven_ddp_with_its_own_context, uneven_ddp_and_zero,
    an_early_end_that_raises, a_joinable_of_ones_own,
]  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_zero_and_join_do_as_over_gloo(ranks, size, case):
    same_as_gloo(ranks(size), case)
