"""DTensor: placements, what moves between them, operations over them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication, local_map

from tests.support import releases

from .compare import World, same_as_gloo

PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())


def line(world: World) -> DeviceMesh:
    return init_device_mesh("cpu", (world.size,))


def grid(world: World) -> DeviceMesh:
    return init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("rows", "columns"))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Whole numbers, so that the order of sums makes no difference; the same on every rank."""
    whole = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(seed))
    return whole.to(torch.get_default_dtype())


def placed(x: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """`x` in one placement; for a partial one the ranks' terms, which torch leaves to its caller."""
    if isinstance(placement, Partial):
        return DTensor.from_local(x * (mesh.get_rank() + 1), mesh, [placement])
    return distribute_tensor(x, mesh, [placement])


def distributed(world: World) -> Any:
    """Also from the first rank's values alone, and with rows that do not divide by the ranks."""
    mesh = line(world)
    x = torch.randn(5, 3) + world.rank
    return [distribute_tensor(x, mesh, [placement]) for placement in PLACEMENTS[:3]]


def redistributed(world: World) -> Any:
    """From every placement to every other, with even and uneven parts."""
    mesh = line(world)
    results = []
    for shape, source, target in itertools.product([(8, 4), (5, 3), (1, 7)], PLACEMENTS, PLACEMENTS[:3]):
        part = placed(numbers(*shape), mesh, source)
        results += [part.redistribute(mesh, [target]).to_local(), part.full_tensor()]
    return results


def redistributed_over_a_grid(world: World) -> Any:
    mesh = grid(world)
    x = numbers(6, 5)
    results = []
    for source, target in itertools.permutations(itertools.product(PLACEMENTS[:3], repeat=2), 2):
        part = distribute_tensor(x, mesh, source)
        moved = part.redistribute(mesh, target)
        assert torch.equal(moved.full_tensor(), x)
        results.append(moved.to_local())
    return results


def redistributed_with_gradients(world: World) -> Any:
    mesh = line(world)
    x = distribute_tensor(numbers(8, 4), mesh, [Shard(0)]).requires_grad_()
    weight = distribute_tensor(numbers(8, 4, seed=1), mesh, [Shard(1)])
    (x.redistribute(mesh, [Shard(1)]) * weight).sum().full_tensor().backward()
    return x.grad


def other_reductions(world: World) -> Any:
    mesh = line(world)
    local = numbers(4, 3, seed=world.rank)
    return [
        DTensor.from_local(local, mesh, [Partial(operation)]).redistribute(mesh, [target])
        for operation, target in itertools.product(("sum", "max", "min"), (Replicate(), Shard(0)))
    ]


def an_average(world: World) -> Any:
    return DTensor.from_local(numbers(4, 3, seed=world.rank), line(world), [Partial("avg")]).full_tensor()


def products(world: World) -> Any:
    """Matrices in every pair of placements; what the sums over shards leave to be added is added."""
    mesh = line(world)
    left, right = numbers(6, 4, seed=1), numbers(4, 5, seed=2)
    results = []
    for one, other in itertools.product(PLACEMENTS[:3], repeat=2):
        result = distribute_tensor(left, mesh, [one]) @ distribute_tensor(right, mesh, [other])
        assert torch.equal(result.full_tensor(), left @ right)
        results.append(result.to_local())
    return results


def largest(x: DTensor) -> torch.Tensor:
    """``x.argmax()``, which gathers tensors without dimensions."""
    if dist.get_backend() == "gloo" and not releases.GLOO_GATHERS_SCALARS:
        return x.full_tensor().argmax()
    return x.argmax()


def operations(world: World) -> Any:
    mesh = line(world)
    x = distribute_tensor(numbers(8, 6), mesh, [Shard(0)])
    y = distribute_tensor(numbers(8, 6, seed=1), mesh, [Shard(1)])
    return [
        z.full_tensor() if isinstance(z, DTensor) else z
        for z in (
            x + y, (x - y).sum(), x.sum(0), x.max(), largest(x), x.mean(1), x.std(0), x.norm(), x.softmax(0),
            x.cumsum(0), x.sort(0).values, x.topk(2, 0).values, torch.nn.functional.layer_norm(x, (6,)),
            x.t() @ y, x.view(4, 12), y.transpose(0, 1), x[1:3], torch.cat([x, y], 1), torch.stack([x, x]),
            torch.where(x > 0, x, y),
        )
    ]  # fmt: skip


def a_loss_and_its_gradients(world: World) -> Any:
    mesh = line(world)
    weight = distribute_tensor(numbers(6, 4), mesh, [Shard(0)]).requires_grad_()
    bias = distribute_tensor(numbers(6), mesh, [Shard(0)]).requires_grad_()
    x = distribute_tensor(numbers(8, 4, seed=3), mesh, [Replicate()])
    torch.nn.functional.linear(x, weight, bias).relu().square().mean().full_tensor().backward()
    return weight.grad, bias.grad


def random_numbers(world: World) -> Any:
    """torch has no common random sequence for a mesh of CPUs: every rank draws from its own generator."""
    mesh = line(world)
    x = distribute_tensor(numbers(8, 4), mesh, [Shard(0)])
    return torch.nn.functional.dropout(x, 0.5), x.normal_(), torch.rand_like(x)


def factories(world: World) -> Any:
    mesh = line(world)
    return [
        dtensor.ones(5, 3, device_mesh=mesh, placements=[Shard(0)]),
        dtensor.zeros(5, 3, device_mesh=mesh, placements=[Shard(1)]),
        dtensor.full((5, 3), 2.5, device_mesh=mesh, placements=[Replicate()]).full_tensor(),
    ]


def local_functions(world: World) -> Any:
    mesh = line(world)

    def local(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y

    function = local_map(
        local, out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)]), device_mesh=mesh
    )
    x, y = numbers(3, 8), numbers(8, 2)
    result = function(distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(y, mesh, [Shard(0)]))
    return result.full_tensor()


def plain_tensors_as_replicas(world: World) -> Any:
    x = distribute_tensor(numbers(8, 4), line(world), [Shard(0)])
    with implicit_replication():
        return (x + numbers(4, seed=1)).full_tensor()


def parts_of_a_mesh(world: World) -> Any:
    mesh = grid(world)
    flat = mesh["rows", "columns"]._flatten("all")
    x = distribute_tensor(numbers(8, 4), mesh["columns"], [Shard(0)])
    return [
        mesh.get_coordinate(), mesh["rows"].get_local_rank(), mesh["columns"].size(), flat.size(),
        x.full_tensor(), distribute_tensor(numbers(8, 4), flat, [Shard(0)]),
    ]  # fmt: skip


def a_module(world: World) -> Any:
    mesh = line(world)

    def shard(name: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter, mesh, [Shard(0)])
            module.register_parameter(key, torch.nn.Parameter(part))

    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
    net = dtensor.distribute_module(net, mesh, shard)
    output = net(distribute_tensor(numbers(4, 6), mesh, [Replicate()]))
    output.full_tensor().square().sum().backward()
    return [parameter.grad for parameter in net.parameters()]


def counted(world: World) -> Any:
    mesh = line(world)
    x, y = (distribute_tensor(numbers(8, 8, seed=n), mesh, [Shard(n)]) for n in range(2))
    with CommDebugMode() as mode:
        (x @ y).redistribute(mesh, [Replicate()])
    assert mode.get_total_counts() > 0
    return mode.get_total_counts()


CASES = [
    counted, distributed, redistributed, redistributed_over_a_grid, redistributed_with_gradients,
    other_reductions, an_average, products, operations, a_loss_and_its_gradients, random_numbers,
    factories, local_functions, plain_tensors_as_replicas, parts_of_a_mesh, a_module,
]  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_dtensor_is_that_over_gloo(ranks, size, case):
    same_as_gloo(ranks(size), case)
