"""Collectives with gradients: torch.distributed.nn.functional, and functional collectives with autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as collectives

from .compare import World, same_as_gloo


def leaf(world: World, *shape: int) -> torch.Tensor:
    """Whole numbers, so that the order of sums makes no difference; others on every rank."""
    generator = torch.Generator().manual_seed(world.rank)
    whole = torch.randint(-8, 8, shape or (4, 3), generator=generator)
    return whole.to(torch.get_default_dtype()).requires_grad_()


def with_gradients(world: World, outputs: Any, *leaves: torch.Tensor) -> Any:
    """The outputs and the leaves' gradients of a sum that weighs every rank's elements differently."""
    tensors = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    weighted = [
        ((world.rank + number + 1) * torch.arange(1.0, t.numel() + 1).reshape(t.shape) * t).sum()
        for number, t in enumerate(tensors)
    ]
    torch.stack(weighted).sum().backward()
    return tensors, [one.grad for one in leaves]


def broadcast(world: World) -> Any:
    x = leaf(world)
    return with_gradients(world, collectives.broadcast(x * 1, src=1), x)


def gather(world: World) -> Any:
    x = leaf(world)
    return with_gradients(world, collectives.gather(x, dst=1), x)


def scatter(world: World) -> Any:
    parts = [leaf(world) for _ in range(world.size)]
    return with_gradients(world, collectives.scatter([p * 1 for p in parts], src=1), *parts)


def reduce(world: World) -> Any:
    """What the other ranks get is theirs to ignore."""
    x = leaf(world)
    sums, gradients = with_gradients(world, collectives.reduce(x * 1, dst=1), x)
    return (sums if world.rank == 1 else None), gradients


def reduce_scatter(world: World) -> Any:
    parts = [leaf(world) for _ in range(world.size)]
    return with_gradients(world, collectives.reduce_scatter(torch.empty(4, 3), parts), *parts)


def all_gather(world: World) -> Any:
    x = leaf(world)
    return with_gradients(world, collectives.all_gather(x), x)


def all_to_all(world: World) -> Any:
    parts = [leaf(world) for _ in range(world.size)]
    outputs = [torch.empty(4, 3) for _ in range(world.size)]
    return with_gradients(world, collectives.all_to_all(outputs, parts), *parts)


def all_to_all_single(world: World) -> Any:
    x = leaf(world, world.size, 3)
    return with_gradients(world, collectives.all_to_all_single(torch.empty(world.size, 3), x), x)


def all_to_all_of_uneven_parts(world: World) -> Any:
    """Rank r sends r + t + 1 rows to rank t."""
    rows = [world.rank + other + 1 for other in range(world.size)]
    x = leaf(world, sum(rows), 2)
    output = collectives.all_to_all_single(torch.empty(sum(rows), 2), x, rows, rows)
    return with_gradients(world, output, x)


def all_reduce(world: World) -> Any:
    x = leaf(world)
    return with_gradients(world, collectives.all_reduce(x * 1), x)


def all_reduce_of_the_largest(world: World) -> Any:
    """torch reduces the gradients with the operation of the values, so only these are compared."""
    return collectives.all_reduce(leaf(world).detach(), op=dist.ReduceOp.MAX)


def in_a_subgroup(world: World) -> Any:
    subgroup, _ = dist.new_subgroups(max(world.size // 2, 1))
    x = leaf(world)
    return with_gradients(world, collectives.all_reduce(x * 1, group=subgroup), x)


def functional(world: World) -> Any:
    """Every functional collective that gives one tensor."""
    x = leaf(world, 2 * world.size, 3).detach()
    group = world.group
    return [
        funcol.wait_tensor(y)
        for y in (
            funcol.all_reduce(x, "sum", group),
            funcol.all_reduce(x, "avg", group),
            funcol.all_reduce(x, "max", group),
            funcol.all_reduce(x.int(), "bor", group),
            funcol.broadcast(x, 1, group),
            funcol.all_gather_tensor(x, 0, group),
            funcol.all_gather_tensor(x, 1, group),
            funcol.reduce_scatter_tensor(x, "sum", 0, group),
            funcol.reduce_scatter_tensor(x.t().contiguous(), "sum", 1, group),
            funcol.all_to_all_single(x, None, None, group),
            funcol.permute_tensor(
                x.flatten(), [(rank + 1) % world.size for rank in range(world.size)], group
            ),
        )
    ]


def functional_uneven(world: World) -> Any:
    rows = [world.rank + other + 1 for other in range(world.size)]
    x = leaf(world, sum(rows), 2).detach()
    return funcol.wait_tensor(funcol.all_to_all_single(x, rows, rows, world.group))


def functional_together(world: World) -> Any:
    tensors = [leaf(world, 2 * world.size, n).detach() for n in (1, 5, 3)]
    group = world.group
    return [
        funcol.wait_tensor(y)
        for together in (
            funcol.all_reduce_coalesced(tensors, "sum", group),
            funcol.all_gather_into_tensor_coalesced(tensors, group),
            funcol.reduce_scatter_tensor_coalesced(tensors, "sum", [0, 0, 0], group),
        )
        for y in together
    ]


def functional_gradients(world: World) -> Any:
    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            funcol.all_reduce(x, "sum", world.group),
            funcol.all_gather_tensor_autograd(x, 0, world.group),
            funcol.reduce_scatter_tensor_autograd(x, "sum", 0, world.group),
            funcol.all_to_all_single_autograd(x, None, None, world.group),
        ]

    results = []
    for number in range(4):
        x = leaf(world, 2 * world.size, 3)
        results.append(with_gradients(world, forward(x)[number] * 1, x))
    return results


def without_waiting(world: World) -> Any:
    """A functional collective's tensor waits for itself when it is used."""
    x = leaf(world).detach()
    y = funcol.all_reduce(x, "sum", world.group)
    z = funcol.all_reduce(y + 1, "sum", world.group)
    return (y * z).sum().item()


def in_the_old_names(world: World) -> Any:
    """The functions of torch.distributed as the compiler rewrites them."""
    x = leaf(world, 2 * world.size, 3).detach()
    gathered, part, reduced = torch.empty(world.size * x.shape[0], 3), torch.empty(2, 3), x.clone()
    funcol.all_gather_tensor_inplace(gathered, x, world.group)
    funcol.reduce_scatter_tensor_inplace(part, x, "sum", world.group)
    funcol.all_reduce_inplace(reduced, "sum", world.group)
    return gathered, part, reduced


CASES = [
    broadcast, gather, scatter, reduce, reduce_scatter, all_gather, all_to_all, all_to_all_single,
    all_to_all_of_uneven_parts, all_reduce, all_reduce_of_the_largest, in_a_subgroup, functional,
    functional_uneven, functional_together, functional_gradients, without_waiting, in_the_old_names,
]  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_values_and_gradients_are_those_of_gloo(ranks, size, case):
    same_as_gloo(ranks(size), case)
